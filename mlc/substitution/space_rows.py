"""Families of row-wise operators (softmax, norms) and of elementwise functions composed of others.

They commute with what joins, cuts and repeats rows, at every rank; a layer norm does not see what is added to all of a
row. (Nor does a softmax, which is proved as well; but the order of a prime field's elements, by which graphs are
compared exactly, changes by addition.) Each law is stated, with a size for each block of axes, since enumerations of
what has so many operators inside would take long and find no others.
"""

from __future__ import annotations

from collections.abc import Callable

from mlc.substitution.family import Call, Family, stated

__all__ = ["families"]

#: functions besides those of :data:`mlc.substitution.space.FUNCTIONS`, and all of them
_MORE = ("exp", "gelu", "silu")
_FUNCTIONS = ("relu", "sigmoid", "tanh", *_MORE)
_NORMS = {"layer_norm": "gb", "rms_norm": "g"}
_WHOLE = "I+J+K-2"


def families() -> list[Family]:
    """The families by operator: concatenation, slicing and repetition first, then what is added to rows."""
    found: list[Family] = []
    found += _moved("softmax", _function("softmax axis=3"), "n {} h c")
    for name, parameters in _NORMS.items():
        found += _moved(name, _norm(name), "n {} h c", parameters)
    found.append(stated("layer_norm-shift", {"x": "n c", "s": "n 1", "g": "c", "b": "c"},
                        _norm("layer_norm")(("add", "x", "s")), _norm("layer_norm")("x")))
    for name in _FUNCTIONS:
        laws = _moved(name, _function(name), "n {} h")
        # slices and concatenations of the others are found where those are
        found += laws if name in _MORE else laws[-1:]
    return found


def _norm(name: str) -> Callable[[Call | str], Call]:
    return lambda x: (f"{name} inverse_epsilon=e", x, *_NORMS[name])


def _function(name: str) -> Callable[[Call | str], Call]:
    return lambda x: (name, x)


def _moved(name: str, of: Callable[[Call | str], Call], shape: str, parameters: str = "") -> list[Family]:
    """Slices, concatenations and repetitions along axis 1, that of the braces in ``shape``; what ``parameters`` name is
    as long as the last axis, c. What is repeated comes last."""
    cut, join = "slice axis=1 begin=I-1 end=I+J-1", "concat axis=1"
    spread = "expand shape=" + shape.format("M").replace(" ", ",").upper()
    given, above = dict.fromkeys(parameters, "c"), dict.fromkeys(parameters, "C")
    return [
        stated(f"{name}-cut", {"x": shape.format(_WHOLE), **given}, (cut, of("x")), of((cut, "x"))),
        stated(f"{name}-join", {"x": shape.format("A"), "y": shape.format("B"), **given},
               (join, of("x"), of("y")), of((join, "x", "y"))),
        stated(f"{name}-repeated", {"x": shape.format("1").upper(), **above}, of((spread, "x")), (spread, of("x"))),
    ]
