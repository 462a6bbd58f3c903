"""The shape rule: what an operator's specification says about sizes alone."""

from __future__ import annotations

from collections.abc import Sequence

from mlc.operators.index import Poly
from mlc.operators.operator import OPERATORS, Attributes
from mlc.operators.tensor import Requirements, ShapeError, tensor_input

__all__ = ["infer"]


def infer(
    name: str, shapes: Sequence[Sequence[Poly | int]], attributes: Attributes, require: Requirements | None = None
) -> list[tuple[Poly, ...]]:
    """The shapes of an operator's results, concrete where the inputs' are.

    What it demands of symbolic sizes is added to ``require``. Raises :class:`ShapeError`, one line, where the demands
    cannot hold. A size compares with an integer, and ``.constant`` is the integer that it is.
    """
    if name not in OPERATORS:
        raise ShapeError(f"no operator is named {name}; there are {', '.join(sorted(OPERATORS))}")
    inputs = [tensor_input(f"in{place}", shape) for place, shape in enumerate(shapes)]
    return [result.shape for result in OPERATORS[name](require or Requirements(), inputs, attributes)]
