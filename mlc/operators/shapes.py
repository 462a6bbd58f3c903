"""The shape rule: what an operator's specification says about sizes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlc.errors import ModelError
from mlc.operators.index import Poly
from mlc.operators.operator import OPERATORS, Attributes
from mlc.operators.tensor import Requirements, ShapeError, tensor_input

__all__ = ["fixed", "infer", "inferred"]


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


def fixed(sizes: Sequence[Any]) -> bool:
    """Whether all sizes are numbers; others are expressions of free dimensions (:class:`mlc.sizes.Size`)."""
    return all(isinstance(size, int) for size in sizes)


def inferred(name: str, shapes: Sequence[Sequence[Any]], attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """The shape of an operator's first result, of shapes in numbers and in expressions of free dimensions.

    What the operator demands must hold for every size that is admitted. Attributes are numbers, but for the shape that
    a reshape makes. Raises :class:`ShapeError`, one line, where that is not so or cannot be decided.
    """
    free: dict[str, Any] = {}

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(of, value))
        if isinstance(value, int | str):
            return value
        free[str(value)] = value
        return Poly.symbol(str(value))

    given = {key: of(value) for key, value in attributes.items()}
    if free and name != "reshape":
        raise ShapeError(f"the attributes of {name} must be numbers, but got {dict(attributes)}")
    require = Requirements()
    try:
        sizes = infer(name, [of(tuple(shape)) for shape in shapes], given, require)[0]
        for condition, sentence in require.conditions:
            if not condition.evaluate(free):
                raise ShapeError(sentence)
        return tuple(size.evaluate(free) for size in sizes)
    except ModelError as error:  # it holds for some sizes only
        raise ShapeError(str(error)) from error
