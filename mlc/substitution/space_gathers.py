"""Families of gathers: what is computed on each row of a table may be computed before or after rows are taken.

A table is mostly constant (an embedding), so that what is done with its rows is done when a model is compiled: products
(the factorised embedding of ALBERT, a projection behind one), norms, functions, scales. Others take one gather for two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlc.substitution.family import Call, Family, family, stated

__all__ = ["families"]

_WORLD = {"a": 2, "n": 3, "c": 4, "s": 5, "m": 2, "k": 4, "A": 2, "B": 3, "I": 2, "J": 2, "K": 2}
#: axes before and behind the one that is gathered along, any number of them each
_TABLE, _ROWS, _TAKEN = "a n c", "s", "gather axis=1"
_FUNCTIONS = ("relu", "sigmoid", "tanh", "exp", "gelu", "silu")


def families() -> list[Family]:
    """Functions, then what combines two tables or a table and a constant, then rows and products."""
    found = [_family(f"gather-{op}", 2, {"x": _TABLE}, f"{op};{_TAKEN}") for op in _FUNCTIONS]
    rows = "gather axis=0"
    for op in ("add", "mul"):
        found += [_family(f"gather-{op}", 3, {"x": _TABLE, "y": _TABLE}, f"{op};{_TAKEN}", **{op: 1, "gather": 2}),
                  stated(f"gather-{op}-scale", {"x": "n c", "i": _ROWS, "v": "1 c"},
                         (op, (rows, "x", "i"), "v"), (rows, (op, "x", ("reshape shape=1,c", "v")), "i")),
                  _family(f"gather-{op}-number", 2, {"x": _TABLE, "s": ""}, f"{op};{_TAKEN}")]
    found += [_family(f"gather-{op}{kept}", 2, {"x": _TABLE}, f"{op} axes=2,{how};{_TAKEN}", **{op: 1})
              for op in ("sum", "mean", "max") for kept, how in (("", ""), ("-kept", " keepdims=1"))]
    found += _rows() + _products() + _moved()
    return found


def _family(name: str, depth: int, inputs: Mapping[str, str], steps: str, **uses: int) -> Family:
    """A family with indices ``i``, at which every gather is."""
    made = family(name, depth, {**inputs, "i": _ROWS}, steps, _WORLD, **{"gather": 1, **uses})
    return replace(made, indices={"i": _WORLD["n"]})


def _rows() -> list[Family]:
    """Softmax and norms over another axis."""
    given = {"x": _TABLE, "i": _ROWS}
    found = [stated("gather-softmax", given, ("softmax axis=2", (_TAKEN, "x", "i")),
                    (_TAKEN, ("softmax axis=2", "x"), "i"))]
    for name, parameters in (("layer_norm", "gb"), ("rms_norm", "g")):
        taken, before = _norm(name, (_TAKEN, "x", "i"), parameters), _norm(name, "x", parameters)
        found.append(stated(f"gather-{name}", {**given, **dict.fromkeys(parameters, "c")}, taken,
                            (_TAKEN, before, "i")))
    return found


def _norm(name: str, x: Call | str, parameters: str) -> Call:
    return (f"{name} inverse_epsilon=e", x, *parameters)


def _products() -> list[Family]:
    """Families of products of rows, of columns, and of matrices."""
    rows = "gather axis=0"
    return [
        _family("gather-product", 2, {"x": "n k", "w": "k m"}, f"matmul;{rows}"),
        _family("gather-product-columns", 2, {"w": "m k", "x": "k n"}, f"matmul;{_TAKEN}"),
        _family("gather-product-batch", 3, {"x": "n m k", "w": "n k c"}, f"matmul;{rows}", matmul=1, gather=2),
    ]


def _moved() -> list[Family]:
    """Tables that are cut, joined, repeated and turned, indices that are joined and viewed otherwise, rows of rows."""
    along, joined = "gather axis=1", {"x": _TABLE, "i": "p A q", "j": "p B q"}
    return [
        _family("gather-joined-behind", 3, {"x": "a n A", "y": "a n B"}, f"concat axis=2;{_TAKEN}", concat=1, gather=2),
        _family("gather-joined-before", 3, {"x": "A n c", "y": "B n c"}, f"concat axis=0;{_TAKEN}", concat=1, gather=2),
        _family("gather-cut-behind", 2, {"x": "a n I+J+K-2"}, f"slice axis=2 begin=I-1 end=I+J-1;{_TAKEN}"),
        _family("gather-cut-before", 2, {"x": "I+J+K-2 n c"}, f"slice axis=0 begin=I-1 end=I+J-1;{_TAKEN}"),
        stated("gather-indices-joined", joined, ("concat axis=2", (along, "x", "i"), (along, "x", "j")),
               (along, "x", ("concat axis=1", "i", "j"))),
        stated("gather-indices-cut", {"x": _TABLE, "i": "p I+J+K-2 q"},
               ("slice axis=2 begin=I-1 end=I+J-1", (along, "x", "i")),
               (along, "x", ("slice axis=1 begin=I-1 end=I+J-1", "i"))),
        stated("gather-gathered", {"x": _TABLE, "i": "p m q", "j": "t"},
               ("gather axis=2", (along, "x", "i"), "j"), (along, "x", ("gather axis=1", "i", "j"))),
        stated("gather-flattened", {"x": "n c", "i": _ROWS},
               ("reshape shape=r,c", ("gather axis=0", "x", "i")), ("gather axis=0", "x", ("reshape shape=r,", "i"))),
        stated("gather-repeated", {"x": "1 n c", "i": _ROWS},
               (along, ("expand shape=M,n,c", "x"), "i"), ("expand shape=M,s,c", (along, "x", "i"))),
        stated("gather-of-repeated", {"x": "a 1 c", "i": _ROWS},
               (along, ("expand shape=a,N,c", "x"), "i"), ("expand shape=a,s,c", "x")),
        _family("gather-turned", 2, {"x": "n c"}, "transpose perm=1,0;gather axis=0;gather axis=1"),
        _family("gather-turned-batch", 2, {"x": "a n c"}, "transpose perm=0,2,1;gather axis=1;gather axis=2"),
    ]
