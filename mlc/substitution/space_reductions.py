"""Families of sums, means and largest elements over axes: what may be computed before one or after it.

Layers that a mean or a sum follows (pooling over a sequence, a set, an image) are linear, so that one row is left to
compute. Products of more axes come as products of matrices with reshapes around them: that is how models hold them.
"""

from __future__ import annotations

from mlc.substitution.family import Family, family

__all__ = ["families"]

_LETTERS = {"n": 2, "m": 3, "c": 4, "N": 2, "M": 3, "K": 4, "C": 5, "R": 6, "A": 2, "B": 3}
_LINEAR = ("sum", "mean")
#: what joins the values of two parts
_JOINS = {"sum": "add", "max": "maximum"}


def families() -> list[Family]:
    """By operator, simple laws first."""
    found = [family("lattice", 2, {"x": "n c", "y": "n c"}, "maximum;minimum;relu;neg", {"n": 2, "c": 4})]
    for op in ("sum", "mean", "max"):
        found += _movements(op)
    for op in _LINEAR:
        found += _linear(op) + _products(op)
    for op, join in _JOINS.items():
        found += [family(f"{op}-parts-{axis + 1}", 3, {"x": f"{head} A", "y": f"{head} B"},
                         f"concat axis={axis};{op} axes={axis},;{join}", _LETTERS, concat=1, **{join: 1, op: 2})
                  for axis, head in ((1, "n"), (2, "n m"))]
    found += [family("max-lattice", 3, {"x": "n c", "y": "n c"}, "maximum;max axes=1, keepdims=1", _LETTERS, maximum=1)]
    return found + [family(f"max-{function}", 2, {"x": "n c"}, f"{function};max axes=1, keepdims=1", _LETTERS)
                    for function in ("relu", "sigmoid", "tanh")]


def _movements(op: str) -> list[Family]:
    """Axes of length 1, several axes at once, transposes and concatenations along other axes."""
    found = []
    for shape, axis, kept, short in (("N M", 1, "N,1", "N,"), ("N M", 0, "1,M", "M,"), ("N M C", 1, "N,1,C", "N,C"),
                                     ("N M C", 2, "N,M,1", "N,M"), ("N M C R", 1, "N,1,C,R", "N,C,R")):
        found.append(family(f"{op}-kept-{len(shape.split())}-{axis}", 2, {"x": shape},
                            f"{op} axes={axis},;{op} axes={axis}, keepdims=1;reshape shape={kept};"
                            f"reshape shape={short}", _LETTERS, **{op: 1, "reshape": 1}))
    found += [
        family(f"{op}-twice", 2, {"x": "n m c"}, f"{op} axes=0,;{op} axes=1,;{op} axes=2,;{op} axes=1,2", _LETTERS),
        family(f"{op}-turned-2", 2, {"x": "n m"}, f"transpose perm=1,0;{op} axes=0,;{op} axes=1,", _LETTERS,
               transpose=1, **{op: 1}),
        family(f"{op}-turned-3", 2, {"x": "n m c"}, f"transpose perm=0,2,1;{op} axes=1,;{op} axes=2,", _LETTERS,
               transpose=1, **{op: 1}),
    ]
    return found + [family(f"{op}-beside-{axis}", 3, {"x": x, "y": y}, f"concat axis={axis};{op} axes={1 - axis}, "
                           "keepdims=1", _LETTERS, concat=1)
                    for axis, x, y in ((0, "A c", "B c"), (1, "n A", "n B"))]


def _linear(op: str) -> list[Family]:
    """Sums of two, scales and biases."""
    found = []
    for rank, axis in ((2, 0), (2, 1), (3, 1), (3, 2)):
        letters, kept = "nmc"[:rank], f"{op} axes={axis}, keepdims=1"
        shape = " ".join(letters)
        along = " ".join("1" if place == axis else letter for place, letter in enumerate(letters))
        found.append(family(f"{op}-add-{rank}-{axis}", 3, {"x": shape, "y": shape}, f"add;{kept}", _LETTERS,
                            add=1, **{op: 2}))
        for name, side in (("scale", along), ("number", "")):
            found += [family(f"{op}-{name}-{join}-{rank}-{axis}", 2, {"x": shape, "s": side}, f"{join};{kept}",
                             _LETTERS, **{join: 1, op: 1}) for join in ("mul", "add")[: 1 + (op == "mean")]]
    return found


def _products(op: str) -> list[Family]:
    """A row that products of matrices add up to, and products of more axes as models hold them."""
    found = []
    for rank, head in ((2, ""), (3, "b ")):
        found.append(family(f"{op}-products-{rank}", 2, {"a": f"{head}m k", "b": f"{head}m k"},
                            f"matmul;{op} axes={rank - 2}, keepdims=1;{op} axes={rank - 1}, keepdims=1",
                            {"b": 2, "m": 2, "k": 2}, matmul=1, **{op: 1}))
    found.append(family(f"{op}-rows", 3, {"x": "N*M K", "w": "K C"},
                        f"matmul;reshape shape=N,M,C;reshape shape=N,M,K;{op} axes=1,", _LETTERS,
                        matmul=1, reshape=1, **{op: 1}))
    return found + [family(f"{op}-rows-{join}", 3, {"x": "N*M C", "s": "1 C"},
                           f"{join};reshape shape=N,M,C;{op} axes=1,", _LETTERS, reshape=1, **{join: 1, op: 1})
                    for join in ("mul", "add")[: 1 + (op == "mean")]]
