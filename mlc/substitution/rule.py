"""A substitution as data: two graphs over the same inputs, the sizes that it holds for, and its certificate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlc.operators.index import Condition, Poly
from mlc.substitution.graph import Graph

__all__ = ["Rule", "symbols_of"]


@dataclass(frozen=True)
class Rule:
    """``source`` may be replaced by ``target``, output by output, wherever the precondition holds.

    The precondition has two parts. ``shapes`` gives every input (of either side) its shape over size symbols, each of
    which stands for any integer of at least 1; a symbol that occurs twice demands equal sizes, a constant demands that
    size. Attributes of the source may hold further symbols (strides, paddings less one), each at least 1 as well; the
    target and the conditions use only symbols of the shapes and of the source. ``conditions`` are further demands on
    the sizes. Under both, source *and* target are well-formed and equal.
    ``two_way`` says that the source may replace the target as well (it reads the same inputs). ``certificate`` is what
    :mod:`mlc.substitution.check` needs to check the proof again; a rule without one is never applied.

    ``blocks`` makes it a rule for many ranks: the names of sizes that stand for any number of axes, wherever such a
    size is one of a shape as it stands. For each block, the inputs that have axes of length 1 in its place, and where
    (an axis of size 1). Without blocks it says what the same rule says at one axis for each.
    """

    name: str
    shapes: Mapping[str, tuple[Poly, ...]]
    source: Graph
    target: Graph
    conditions: tuple[Condition, ...] = ()
    certificate: Mapping[str, Any] | None = field(default=None, compare=False)
    blocks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def two_way(self) -> bool:
        return set(self.source.inputs) == set(self.target.inputs)

    @property
    def turned(self) -> Rule:
        """The rule that the source may replace the target."""
        return replace(self, source=self.target, target=self.source)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The size symbols that the rule holds for all values of, sorted: of shapes and the source's attributes."""
        values = [*self.shapes.values(), *(value for node in self.source.nodes for value in node.attributes.values())]
        return tuple(sorted(set().union(*map(symbols_of, values))))


def symbols_of(value: Any) -> set[str]:
    """The size symbols in a polynomial, or in those of a tuple."""
    if isinstance(value, Poly):
        return set(value.symbols)
    return set().union(*map(symbols_of, value)) if isinstance(value, tuple) else set()
