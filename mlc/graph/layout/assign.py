"""The choice of a layout for each value of a graph, for the whole graph at once, by integer programming.

Every operator has alternatives, each with the layouts that it reads, the one that it makes and its price; a value may
be converted to further layouts, at a price that is paid once. The cheapest consistent choice is a small integer
linear program, solved by HiGHS (Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018). After Liu
et al., "Optimizing CNN Model Inference on CPUs" (2019), who choose blockings of convolutions this way.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

__all__ = ["Alternative", "assign"]

L = TypeVar("L", bound=Hashable)

#: Nodes of the search after which the best choice found so far is taken: those of the benchmark networks are solved at
#: the first. A limit in nodes gives the same choice on a machine that is busy; the one in seconds ends what hangs.
_NODES, _PATIENCE = 500, 1800.0


@dataclass(frozen=True)
class Alternative(Generic[L]):
    """One way to make a value: in ``layout``, from values in the layouts that ``reads`` names, in ``seconds``."""

    layout: L
    reads: Mapping[Hashable, L] = field(default_factory=dict)
    seconds: float = 0.0


def assign(
    values: Mapping[Hashable, Sequence[Alternative[L]]],
    wanted: Iterable[tuple[Hashable, L]],
    conversion: Callable[[Hashable, L], float],
) -> dict[Hashable, Alternative[L]]:
    """The cheapest way to have every ``wanted`` value in its layout; values that nobody needs are left out.

    ``conversion(value, layout)`` is the price in seconds of having ``value`` in ``layout`` besides the layout that it
    is made in. Of equally cheap choices the one with the earlier alternatives wins. Raises ``ValueError`` where a
    value is wanted that nothing makes.
    """
    return _Program(values, list(wanted), conversion).solve()


class _Program(Generic[L]):
    """Variables are 0 or 1: ``made`` is taken for an alternative, ``converted`` for a value in one more layout."""

    def __init__(
        self, values: Mapping[Hashable, Sequence[Alternative[L]]], wanted: list[tuple[Hashable, L]],
        conversion: Callable[[Hashable, L], float],
    ) -> None:
        self._values = values
        self._costs: list[float] = []
        self._made = {
            (value, i): self._variable(alternative.seconds * 1e6 + 1e-4 * i)
            for value, alternatives in values.items() for i, alternative in enumerate(alternatives)
        }
        self._converted: dict[tuple[Hashable, L], int] = {}
        self._rows: list[tuple[dict[int, float], float]] = []  # sum(row) <= bound
        needs = [need for alternatives in values.values() for a in alternatives for need in a.reads.items()]
        for value, layout in dict.fromkeys([*wanted, *needs]):
            if value not in values:
                raise ValueError(f"every value that is read must be made, but {value} is not")
            if any(alternative.layout != layout for alternative in values[value]):
                self._converted[value, layout] = self._variable(conversion(value, layout) * 1e6 + 1e-4)
        self._constrain(wanted)

    def _variable(self, cost: float) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def _constrain(self, wanted: list[tuple[Hashable, L]]) -> None:
        for value, alternatives in self._values.items():
            self._rows.append((dict.fromkeys(self._ways(value), 1.0), 1.0))
            readers: dict[tuple[Hashable, L], dict[int, float]] = defaultdict(dict)
            sources: dict[Hashable, dict[int, float]] = defaultdict(dict)
            for i, alternative in enumerate(alternatives):
                for source, layout in alternative.reads.items():
                    readers[source, layout][self._made[value, i]] = 1.0
                    sources[source][self._made[value, i]] = 1.0
            for (source, layout), row in readers.items():
                self._rows.append(({**row, **self._there(source, layout)}, 0.0))
            for source, row in sources.items():  # implied for whole numbers; halves could do without
                self._rows.append(({**row, **dict.fromkeys(self._ways(source), -1.0)}, 0.0))
        for (value, layout), variable in self._converted.items():  # only what is made can be converted
            others = [self._made[value, i] for i, a in enumerate(self._values[value]) if a.layout != layout]
            self._rows.append(({variable: 1.0, **dict.fromkeys(others, -1.0)}, 0.0))
        for value, layout in wanted:
            self._rows.append((self._there(value, layout), -1.0))
            self._rows.append((dict.fromkeys(self._ways(value), -1.0), -1.0))

    def _ways(self, value: Hashable) -> list[int]:
        return [self._made[value, i] for i in range(len(self._values[value]))]

    def _there(self, value: Hashable, layout: L) -> dict[int, float]:
        """The variables that make ``value`` available in ``layout``, negated."""
        ways = [self._made[value, i] for i, a in enumerate(self._values[value]) if a.layout == layout]
        ways += [self._converted[value, layout]] if (value, layout) in self._converted else []
        return dict.fromkeys(ways, -1.0)

    def solve(self) -> dict[Hashable, Alternative[L]]:
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes a quarter of a second
        from scipy.sparse import csr_array

        entries = [(r, column, weight) for r, (row, _) in enumerate(self._rows) for column, weight in row.items()]
        rows, columns, weights = zip(*entries, strict=True)
        shape = (len(self._rows), len(self._costs))
        matrix = csr_array((np.array(weights), (np.array(rows), np.array(columns))), shape=shape)
        bounds = np.array([bound for _, bound in self._rows])
        started = time.monotonic()
        found = milp(
            np.array(self._costs), integrality=np.ones(len(self._costs)), bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, -np.inf, bounds),
            options={"node_limit": _NODES, "time_limit": _PATIENCE},
        )
        if time.monotonic() - started > _PATIENCE:
            warnings.warn(f"a choice of layouts must take less than {_PATIENCE:g} s, but it was stopped then: the "
                          "build may be slower than another one of the same model; build it again on a machine with "
                          "less to do", stacklevel=2)
        if found.x is None:
            raise ValueError(f"no choice of layouts satisfies every operator ({found.message})")
        return {
            value: self._values[value][i] for (value, i), variable in self._made.items() if found.x[variable] > 0.5
        }
