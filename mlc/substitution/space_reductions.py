"""Families of reductions (sum, mean, max): what may be computed before or after one.

Layers that a mean or a sum follows (pooling over a sequence, a set, an image) are linear, so that one row is left to
compute. Products of more axes come as products of matrices with reshapes around them: that is how models hold them.
"""

from __future__ import annotations

from dataclasses import replace

from mlc.substitution.family import Family, family

__all__ = ["families"]

_LETTERS = {"n": 2, "m": 3, "c": 4, "N": 2, "M": 3, "K": 4, "C": 5, "R": 6, "A": 2, "B": 3}
_LINEAR = ("sum", "mean")
#: what joins the values of two parts
_JOINS = {"sum": "add", "max": "maximum"}


def families() -> list[Family]:
    """The families by operator, simple laws first."""
    found = [family("lattice", 2, {"x": "n c", "y": "n c"}, "maximum;minimum;relu;neg", {"n": 2, "c": 4})]
    for op in ("sum", "mean", "max"):
        found += _movements(op)
    for op in _LINEAR:
        found += _products(op) + _rows(op) + _linear(op) + _images(op)
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
    found.append(family(f"{op}-twice", 2, {"x": "n m c"}, f"{op} axes=0,;{op} axes=1,;{op} axes=2,;{op} axes=1,2",
                        _LETTERS))
    # no transpose is left before a reduction; one over the other axis follows only by way of two
    found += [replace(family(f"{op}-turned-{rank}", 2, {"x": shape}, f"transpose perm={perm};{op} axes={rank - 2},;"
                             f"{op} axes={rank - 1},", _LETTERS, transpose=1, **{op: 1}), derived=True)
              for rank, shape, perm in ((2, "n m", "1,0"), (3, "n m c", "0,2,1"))]
    return found + [family(f"{op}-beside-{axis}", 3, {"x": x, "y": y}, f"concat axis={axis};{op} axes={1 - axis}, "
                           "keepdims=1", _LETTERS, concat=1)
                    for axis, x, y in ((0, "A c", "B c"), (1, "n A", "n B"))]


def _images(op: str) -> list[Family]:
    """Images of which one value a channel is left, after a convolution by single elements, a scale or a bias: axes that
    stay, and axes that go."""
    world, found = {"n": 2, "c": 3, "h": 4, "w": 5, "N": 2, "C": 3, "O": 6}, []
    for name, reduce, more in (("image", f"{op} axes=2,3 keepdims=1", ("", "")),
                               ("image-flat", f"{op} axes=2,3",
                                (";reshape shape=N,C,1,1;reshape shape=N,O", ";reshape shape=1,C"))):
        reshapes = more[0].count("reshape")
        found.append(family(f"{op}-{name}", 2 + reshapes, {"x": "N C h w", "v": "O C 1 1"},
                            f"conv2d;{reduce}{more[0]}", world, conv2d=1, reshape=reshapes, **{op: 1}))
        for side, shape in (("scale", "1 C 1 1"), ("number", "")):
            found += [family(f"{op}-{name}-{side}-{join}", 3, {"x": "N C h w", "s": shape}, f"{join};{reduce}{more[1]}",
                             world, reshape=1, **{join: 1, op: 1}) for join in _constants(op)]
    return found


def _constants(op: str) -> tuple[str, ...]:
    """What a constant is joined by that a reduction passes as it is: a bias adds up in a sum."""
    return ("mul", "add") if op == "mean" else ("mul",)


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
                             _LETTERS, **{join: 1, op: 1}) for join in _constants(op)]
    return found


def _products(op: str) -> list[Family]:
    """A row that products of matrices add up to, and a column, which follows from it by way of two transposes."""
    return [replace(family(f"{op}-products-{rank}", 2, {"a": f"{head}m k", "b": f"{head}m k"},
                           f"matmul;{op} axes={rank - 2}, keepdims=1;{op} axes={rank - 1}, keepdims=1",
                           {"b": 2, "m": 2, "k": 2}, matmul=1, **{op: 1}), derived=True)
            for rank, head in ((2, ""), (3, "b "))]


def _rows(op: str) -> list[Family]:
    """What is done to all rows of several sets, as models hold it, and then reduced to one row of each.

    Where the axis stays, that follows from the laws of axes that go and of reshapes; but no step of that way leaves
    less to do, and a search takes only those that do. So it comes first, in operators that have no other way to say it.
    """
    kept, gone = f"{op} axes=1, keepdims=1", f"{op} axes=1,"
    rows, parts = {"x": "N*M K", "w": "K C"}, "matmul;reshape shape=N,M,C;reshape shape=N,M,K"
    found = [family(f"{op}-rows-kept", 5, rows, f"{parts};reshape shape=N,K;reshape shape=N,1,C;{kept}", _LETTERS,
                    matmul=1, reshape=3, **{op: 1}),
             family(f"{op}-rows", 3, rows, f"{parts};{gone}", _LETTERS, matmul=1, reshape=1, **{op: 1})]
    for join in _constants(op):
        x, both, uses = {"x": "N*M C", "s": "1 C"}, f"{join};reshape shape=N,M,C", {join: 1, op: 1}
        found.append(family(f"{op}-rows-kept-{join}", 4, x, f"{both};reshape shape=1,1,C;{kept}", _LETTERS, reshape=2,
                            **uses))
        found.append(family(f"{op}-rows-{join}", 3, x, f"{both};{gone}", _LETTERS, reshape=1, **uses))
    return found
