"""What an operator of the graph language is, and the table of all of them.

An entry says everything that this compiler knows of an operator: readers and writers of graphs, folding, searches,
costs, proofs and passes derive from it what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar

from mlc.operators.index import Poly
from mlc.operators.laws import LAWS, Laws
from mlc.operators.relax import FOREIGN, Foreign, Relax
from mlc.operators.scalar import Scalar
from mlc.operators.tensor import Requirements, ShapeError, Tensor

__all__ = ["OPERATORS", "Attributes", "Operator", "Value", "operator", "operators_where", "relax_where"]

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
    """

    name: str
    arity: int
    define: Definition
    defaults: Mapping[str, Any] = field(default_factory=dict)

    # -- its names elsewhere

    #: what Relax calls it; None for what models do not hold, or hold as an expression
    relax: Relax | None = None
    #: what TASO's files call it; empty where they do not, or say more than a name
    taso: str = ""

    # -- values

    #: defined by other operators (softmax, layer norm)
    expansion: bool = False
    #: what an element is of those of the inputs, for a pointwise one that is no expansion
    scalar: Callable[..., Scalar] | None = None
    #: a function of the reals that is not polynomial: its values in float64, and what is known of it
    real: Callable[[Any], Any] | None = None
    laws: Laws | None = None
    #: ``(arithmetic, shape of the result, inputs, all attributes) -> array``, where the specification would be slow
    quick: Callable[..., Any] | None = None
    #: the same on arrays of any type, where numpy rounds as TVM does
    numpy: Callable[..., Any] | None = None

    # -- what is true of it

    #: works element by element: it commutes with what only moves elements, and costs next to nothing in the kernel that
    #: makes an operand
    pointwise: bool = False
    #: an element may be undefined although all that it is computed of is defined (a quotient, a logarithm, a root);
    #: indices of a model lie in their axes, and are clamped where they do not
    partial: bool = False
    #: finite values that do not grow from one use to the next: whatever was computed of zeros stays finite
    tame: bool = False
    #: the second operand that changes nothing, or either if the operator is ``commutative``
    neutral: int | None = None
    commutative: bool = False
    #: ``f(x, x)`` is ``x``; of a function, whose laws say so, ``f(f(x))`` is ``f(x)``
    idempotent: bool = False
    #: ``f(f(x))`` is ``x``
    involution: bool = False
    #: every element is one of an input's, or 0
    movement: bool = False
    #: sums, means or largest elements over axes
    reduction: bool = False
    #: how many products an element is the sum of, by the shapes of the inputs; None for what is no product
    products: Callable[[Sequence[Any], Sequence[Any]], Any] | None = None
    #: whether a compile evaluates it where its inputs are constants
    folds: bool = True

    @property
    def product(self) -> bool:
        """Whether it multiplies matrices or convolves."""
        return self.products is not None

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
    name: str, arity: int, defaults: Mapping[str, Any] | None = None, **traits: Any
) -> Callable[[Defined], Defined]:
    """Enters the decorated definition into :data:`OPERATORS`; ``traits`` are further fields of :class:`Operator`."""

    def enter(define: Defined) -> Defined:
        if name in OPERATORS:
            raise ValueError(f"the operator {name} is defined twice")
        if traits.get("laws") is not None and traits["laws"].idempotent:
            traits["idempotent"] = True
        entry = OPERATORS[name] = Operator(name, arity, define, defaults or {}, **traits)
        if entry.laws is not None:
            LAWS[name] = entry.laws
        return define

    return enter


def relax_where(holds: Callable[[Operator | Foreign], object]) -> tuple[str, ...]:
    """The names in Relax, without ``relax.``, of the operators of which something holds, the table's and others."""
    known: dict[str, Operator | Foreign] = {**FOREIGN}
    known |= {each.relax.name: each for each in OPERATORS.values() if each.relax is not None}
    return tuple(name for name, each in known.items() if holds(each))


def operators_where(holds: Callable[[Operator], object]) -> tuple[str, ...]:
    """The names of the operators of which something holds, in the order of the table."""
    return tuple(name for name, each in OPERATORS.items() if holds(each))
