"""What Relax calls operators: how calls become operators of the table and back, and what is true of those it lacks.

Nothing here imports TVM: a call's attributes are read as they are, and a call is built by the function of
``tvm.relax.op`` that bears its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["FOREIGN", "Foreign", "Relax", "Shape", "Shapes", "integers"]

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Sequence[Shape]


def _no_attributes(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Relax:
    """``name``, without ``relax.``, is that of the operator and of the function in ``tvm.relax.op`` that builds a call.

    ``read(attrs, shapes, shape)`` are the attributes of the operator for those of a call, whose arguments and result
    have the given shapes; None for a use that the language lacks. ``write(attributes, shapes, shape)`` are the keyword
    arguments of the function.
    """

    name: str
    read: Callable[[Any, Shapes, Shape], dict[str, Any] | None] = _no_attributes
    write: Callable[[Mapping[str, Any], Shapes, Shape], dict[str, Any]] = _no_attributes


@dataclass(frozen=True)
class Foreign:
    """What is true of an operator of Relax that the table lacks; see :class:`mlc.operators.Operator`.

    What is not said may be true nonetheless: no pass relies on it. ``tame`` is None where nobody has said it.
    ``arity`` counts the tensors that a pointwise one combines: its other arguments are numbers.
    """

    arity: int = 1
    pointwise: bool = False
    partial: bool = False
    tame: bool | None = None
    movement: bool = False
    idempotent: bool = False
    involution: bool = False


#: by name, without ``relax.``
FOREIGN: dict[str, Foreign] = {
    **dict.fromkeys(("astype", "clip", "nn.gelu_tanh", "nn.leakyrelu"), Foreign(pointwise=True, tame=True)),
    **dict.fromkeys(("abs", "round"), Foreign(pointwise=True, tame=True, idempotent=True)),
    **dict.fromkeys(("cos", "nn.selu", "nn.softplus", "sin", "square"), Foreign(pointwise=True)),
    **dict.fromkeys(("ceil", "floor", "nn.relu6", "sign"), Foreign(pointwise=True, idempotent=True)),
    **dict.fromkeys(("bitwise_not", "logical_not"), Foreign(involution=True)),
    **dict.fromkeys(
        ("acos", "acosh", "asin", "atanh", "floor_divide", "floor_mod", "log10", "log1p", "log2", "mod", "tan"),
        Foreign(partial=True),
    ),
    "power": Foreign(2, pointwise=True, partial=True, tame=False),
    **dict.fromkeys(("flip", "gather_elements", "gather_nd", "repeat", "tile"), Foreign(movement=True)),
}


def integers(values: Any) -> tuple[int, ...]:
    """An attribute that is a list of integers."""
    return tuple(int(value) for value in values)
