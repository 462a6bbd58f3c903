"""Values of operators on arrays: in the quick way that an entry of the table gives, else by its specification.

``evaluate(name, inputs, attributes)`` is over float64; ``evaluate(..., arithmetic=FIELD)`` is exact over the prime
field, with arrays of uint64 below p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from mlc.operators.arithmetic import FIELD, REAL, STRICT, Arithmetic, Array
from mlc.operators.expansions import EXPANSIONS
from mlc.operators.interpret import elementwise, interpret
from mlc.operators.operator import OPERATORS, Attributes
from mlc.operators.shapes import infer
from mlc.operators.tensor import Requirements, ShapeError, tensor_input

__all__ = ["FIELD", "REAL", "STRICT", "evaluate", "reference"]

Shape = tuple[int, ...]


def evaluate(name: str, inputs: Sequence[Array], attributes: Attributes, arithmetic: Arithmetic = REAL) -> list[Array]:
    """The results of an operator. Raises :class:`ShapeError` where operands do not fit it."""
    shape = shape_of(name, tuple(a.shape for a in inputs), attributes)
    given = {**OPERATORS[name].defaults, **attributes}
    if name in EXPANSIONS:
        return [EXPANSIONS[name](_apply(arithmetic), *inputs, **given)]
    quick, scalar = OPERATORS[name].quick, OPERATORS[name].scalar
    if quick is not None:
        return [quick(arithmetic, shape, inputs, given)]
    if scalar is not None:
        return [elementwise(scalar, inputs, arithmetic)]
    return reference(name, inputs, attributes, arithmetic)


def _apply(arithmetic: Arithmetic) -> Callable[..., Array]:
    def apply(name: str, *operands: Array, **attributes: Any) -> Array:
        return evaluate(name, operands, attributes, arithmetic)[0]

    return apply


def reference(name: str, inputs: Sequence[Array], attributes: Attributes, arithmetic: Arithmetic = REAL) -> list[Array]:
    """The results by the specification itself, element by element over grids of indices."""
    named = {f"in{place}": array for place, array in enumerate(inputs)}
    symbolic = [tensor_input(key, array.shape) for key, array in named.items()]
    results = OPERATORS[name](Requirements(), symbolic, attributes)
    return [interpret(result, named, arithmetic) for result in results]


def shape_of(name: str, shapes: tuple[Shape, ...], attributes: Attributes) -> Shape:
    """The shape of the result for concrete shapes; remembered."""
    found = _shape_of(name, shapes, tuple(attributes.items()))
    if isinstance(found, ShapeError):
        raise ShapeError(*found.args)
    return found


@lru_cache(maxsize=1 << 16)
def _shape_of(name: str, shapes: tuple[Shape, ...], attributes: tuple[tuple[str, Any], ...]) -> Shape | ShapeError:
    try:
        (sizes,) = infer(name, shapes, dict(attributes))
    except ShapeError as error:
        return error
    concrete = tuple(size.constant for size in sizes)
    if None in concrete:
        raise ShapeError(f"{name} is evaluated at concrete sizes, but its result has the shape {sizes}")
    return concrete  # type: ignore[return-value]
