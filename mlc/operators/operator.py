"""What an operator of the graph language is, and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar

from mlc.operators.index import Poly
from mlc.operators.tensor import Requirements, ShapeError, Tensor

__all__ = ["OPERATORS", "Attributes", "Operator", "Value", "operator"]

#: an attribute: an integer, a size expression, a rational number, a word, or a tuple of these
Value: TypeAlias = "int | str | Poly | Fraction | tuple[Value, ...]"
Attributes: TypeAlias = Mapping[str, Value]
Definition: TypeAlias = Callable[..., "Tensor | tuple[Tensor, ...]"]
Defined = TypeVar("Defined", bound=Definition)


@dataclass(frozen=True)
class Operator:
    """One operator of the graph language.

    ``define(requirements, *inputs, **attributes)`` is the single specification: it states what it demands of the
    sizes and returns the symbolic result, from which evaluation, the shape rule and proof obligations come.
    ``arity`` is the number of inputs. ``defaults`` names every attribute with its default, None where there is none.
    ``expansion`` is True for what is defined by other operators (softmax, layer norm). ``partial`` is True where an
    element may be undefined although all that it is computed of is defined (a quotient, a logarithm, a root).
    """

    name: str
    arity: int
    define: Definition
    defaults: Mapping[str, Any] = field(default_factory=dict)
    expansion: bool = False
    partial: bool = False

    def __call__(self, require: Requirements, inputs: Sequence[Tensor], attributes: Attributes) -> tuple[Tensor, ...]:
        """The results for symbolic inputs; raises :class:`ShapeError` where the demands cannot hold."""
        if len(inputs) != self.arity:
            raise ShapeError(f"{self.name} takes {self.arity} inputs, but got {len(inputs)}")
        unknown = sorted(set(attributes) - set(self.defaults))
        if unknown:
            raise ShapeError(f"{self.name} has the attributes {sorted(self.defaults)}, but got {unknown}")
        given = {name: _plain(value) for name, value in {**self.defaults, **attributes}.items()}
        missing = sorted(name for name, value in given.items() if value is None)
        if missing:
            raise ShapeError(f"{self.name} needs the attributes {missing}")
        found = self.define(require, *inputs, **given)
        return found if isinstance(found, tuple) else (found,)


#: every operator by its name
OPERATORS: dict[str, Operator] = {}


def _plain(value: Any) -> Any:
    """A size that is a number as an integer, so that ``"0"`` says the same as ``0``."""
    if isinstance(value, Poly):
        return value if value.constant is None else value.constant
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def operator(
    name: str, arity: int, *, expansion: bool = False, partial: bool = False, **defaults: Any
) -> Callable[[Defined], Defined]:
    """Enters the decorated definition into :data:`OPERATORS`; keyword arguments are attributes and their defaults."""

    def enter(define: Defined) -> Defined:
        if name in OPERATORS:
            raise ValueError(f"the operator {name} is defined twice")
        OPERATORS[name] = Operator(name, arity, define, defaults, expansion, partial)
        return define

    return enter
