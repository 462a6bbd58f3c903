"""How operators are written in egglog: one constructor for an operator, its ranks and its structural attributes.

Attributes that steer what an operator is (an axis, a permutation) are part of the constructor's name; those that are
sizes (strides, kernels, bounds of a slice) are its integer arguments, so that a rule can read and compute them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlc.operators import OPERATORS
from mlc.operators.index import Poly, as_poly
from mlc.operators.operator import Attributes, Value
from mlc.operators.sliding import pair, window_axis
from mlc.operators.tensor import Requirements

__all__ = ["Call", "Form", "Symbols"]

#: attributes that are part of a constructor's name
_STRUCTURAL = frozenset({"axis", "axes", "perm", "keepdims", "count_include_pad", "value"})


@dataclass(frozen=True)
class Form:
    """What a constructor stands for: ``layout`` gives every attribute its value, or None times its number of sizes."""

    op: str
    arity: int
    fixed: tuple[tuple[str, Any], ...]
    #: (name, how many sizes, whether a tuple), in the order of the arguments
    sized: tuple[tuple[str, int, bool], ...]

    @property
    def size_count(self) -> int:
        return sum(count for _, count, _ in self.sized)

    def attributes(self, sizes: Sequence[int]) -> dict[str, Value]:
        """The attributes for the constructor's integer arguments."""
        found: dict[str, Value] = dict(self.fixed)
        rest = list(sizes)
        for name, count, is_tuple in self.sized:
            taken, rest = rest[:count], rest[count:]
            found[name] = tuple(taken) if is_tuple else taken[0]
        return found


@dataclass(frozen=True)
class Call:
    """A constructor and its integer arguments, which may be symbolic."""

    symbol: str
    form: Form
    sizes: tuple[Poly, ...]


class Symbols:
    """The constructors in use, and the egglog text that declares those which are new."""

    def __init__(self) -> None:
        self.operators: dict[str, Form] = {}
        self._new: list[str] = []

    def call(self, op: str, shapes: Sequence[Sequence[Any]], attributes: Attributes) -> Call:
        """The constructor of a node whose inputs have ``shapes`` (only ranks matter, and sizes for ``same``)."""
        fixed: list[tuple[str, Any]] = []
        sized: list[tuple[str, int, bool]] = []
        sizes: list[Poly] = []
        for name, value in sorted(_resolved(op, shapes, attributes).items()):
            if name in _STRUCTURAL or isinstance(value, str):
                fixed.append((name, value))
                continue
            values = value if isinstance(value, tuple) else (value,)
            sized.append((name, len(values), isinstance(value, tuple)))
            sizes.extend(as_poly(size) for size in values)
        form = Form(op, len(shapes), tuple(fixed), tuple(sized))
        words = [f"{name}={_word(value)}" for name, value in fixed] + [f"{name}:{count}" for name, count, _ in sized]
        ranks = ",".join(str(len(shape)) for shape in shapes)
        symbol = f"{op}/{ranks}[{','.join(words)}]"
        if symbol not in self.operators:
            self.operators[symbol] = form
            self._new.append(_declaration(symbol, form))
        return Call(symbol, form, tuple(sizes))

    def take_declarations(self) -> list[str]:
        taken, self._new = self._new, []
        return taken


def _declaration(symbol: str, form: Form) -> str:
    """The constructor, which rule built each node first, and that constants in make a constant out."""
    sorts = " ".join(["T"] * form.arity + ["i64"] * form.size_count)
    tensors = [f"?x{place}" for place in range(form.arity)]
    sizes = [f"?s{place}" for place in range(form.size_count)]
    node = f"(= ?n ({' '.join([symbol, *tensors, *sizes])}))"
    constant = " ".join(f"(weight {tensor})" for tensor in tensors)
    return (f"(constructor {symbol} ({sorts}) T)\n"
            f"(function made:{symbol} ({sorts}) i64 :merge (min old new))\n"
            f"(rule ({node} {constant}) ((weight ?n)) :ruleset analysis)")


def _resolved(op: str, shapes: Sequence[Sequence[Any]], attributes: Attributes) -> Mapping[str, Any]:
    """All attributes, defaults filled in, axes counted from the front, padding as numbers."""
    given = {**OPERATORS[op].defaults, **attributes}
    found: dict[str, Any] = {n: tuple(v) if isinstance(v, (list, tuple)) else v for n, v in given.items()}
    if "axis" in found:
        found["axis"] = int(found["axis"]) % len(shapes[0])
    if "axes" in found:
        found["axes"] = tuple(sorted(int(axis) % len(shapes[0]) for axis in found["axes"]))
    if isinstance(found.get("padding"), str):
        found["padding"] = _padding(found, shapes)
    return found


def _padding(attributes: Mapping[str, Any], shapes: Sequence[Sequence[Any]]) -> tuple[Poly, ...]:
    """(top, left, bottom, right) for the words "same" and "valid"."""
    kernel: Any = attributes["kernel"] if "kernel" in attributes else shapes[1][2:]
    before, after = [], []
    for extent, window, stride, dilation in zip(map(as_poly, shapes[0][2:]), pair(kernel), pair(attributes["stride"]),
                                                pair(attributes.get("dilation", (1, 1))), strict=True):
        axis = window_axis(Requirements(), "padding", extent, window, stride, attributes["padding"], dilation)
        needed = (axis.size - 1) * stride + (window - 1) * dilation + 1 - extent
        if attributes["padding"] == "valid":
            needed = as_poly(0)
        elif needed.constant is None and stride != 1:
            raise ValueError('padding "same" with strides other than 1 must be written in numbers in a rule')
        total = needed if needed.constant is None else as_poly(max(0, needed.constant))
        before.append(axis.before)
        after.append(total - axis.before)
    return (*before, *after)


def _word(value: Any) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)
