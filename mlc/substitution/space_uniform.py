"""Families that search part of the operator table uniformly: all graphs of a number of operators over matrices of one
size.

The families of the library say which operators may meet, since that is where laws are expected; these take all of
theirs together, and look for what the library does not derive.
"""

from __future__ import annotations

from dataclasses import replace

from mlc.substitution.family import Family, family

__all__ = ["families"]

#: of four elements one tensor in sixteen has all at least 0, and is its own relu; of nine, one in five hundred
_WORLD = dict.fromkeys("mk", 3)
_ROWS = "sum axes=1, keepdims=1;mean axes=1, keepdims=1;max axes=1, keepdims=1;softmax axis=1"
_MOVES = "transpose perm=1,0;concat axis=0;concat axis=1"


def families() -> list[Family]:
    """Three operators of all that take matrices, of one or two inputs; then four of TASO's core, of three inputs."""
    return [replace(family(f"uniform-{name}", depth, dict.fromkeys(inputs, "m k"), steps, _WORLD), uniform=True)
            for name, depth, inputs, steps in (
                ("functions", 3, "a", "add;sub;mul;div;maximum;minimum;neg;reciprocal;relu;sigmoid;tanh;exp;log;sqrt;"
                                      f"rsqrt;erf;gelu;silu;matmul;{_ROWS};{_MOVES}"),
                ("matrices", 3, "ab", f"add;sub;mul;maximum;minimum;neg;relu;matmul;{_ROWS};{_MOVES}"),
                ("core", 4, "abc", f"add;mul;relu;matmul;{_MOVES}"),
            )]
