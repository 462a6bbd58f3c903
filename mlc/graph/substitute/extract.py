"""Extraction: the cheapest choice of one option for every e-class that is needed.

An integer program over the e-graph, solved by HiGHS (Huangfu and Hall, 2018), as in Tensat (Yang et al., "Equality
saturation for tensor graph superoptimization", 2021). Cyclic choices are cut off when they occur, which is rare. A
greedy choice and the original graph are alternatives: the best of the three is taken. (Their cost as a bound in the
program keeps HiGHS from finding anything for a long time.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlc.graph.substitute.costs import Cost
from mlc.graph.substitute.saturate import Choices
from mlc.substitution.egraph import PATIENCE, PRODUCTS, ENode
from mlc.substitution.terms import Term, TermBuilder, TermGraph

__all__ = ["Extracted", "Extraction", "Problem", "as_terms", "extract"]

#: cycles that are cut off before the greedy choice has to do
_MAX_CUTS = 40
#: a choice this close to the cheapest is cheap enough: the costs are estimates
_GAP = 0.005
#: nodes of the search tree; beyond the first few the choice gains a percent and takes seconds
_NODES = 1
#: work of a solution, in comparisons of an e-graph's nodes, for the square of how many entries the program's matrix
#: has: 4,000 of them take a second and a half, as 150,000 comparisons do
_SOLVING = 0.01
#: what each option costs besides, so that nothing is chosen for nothing; seconds
_LEAST = 1e-10

Pick = Mapping[int, ENode]
CostOf = Callable[[ENode, tuple[int, ...]], Cost]


@dataclass(frozen=True)
class Extraction:
    """An option for each class that the outputs need, and their cost in seconds. ``how`` is ``program``, ``greedy`` or
    ``original``."""

    pick: Pick
    seconds: float
    how: str


class Extracted(NamedTuple):
    """The choices found, the work done, and what ended the program early: ``work``, ``seconds``, or None."""

    choices: list[Extraction]
    work: float
    stopped: str | None


class Problem:
    """The options of every class and their costs. Constant classes are reduced beforehand to their options with the
    fewest operators."""

    def __init__(self, choices: Choices, cost: CostOf, held: Callable[[tuple[int, ...]], float]) -> None:
        self.choices = choices
        self.constants = _fewest(choices)
        self.held = {c: held(choices.shapes[c]) for c in self.constants}
        self.options: dict[int, tuple[ENode, ...]] = {}
        self.costs: dict[tuple[int, int], Cost] = {}
        for each in _reachable(choices):
            if each in self.constants:
                continue
            known = [o for o in choices.options[each]
                     if all(i in self.constants or i not in choices.constant for i in o.inputs)]
            self.options[each] = tuple(sorted(known, key=_order))
            for place, option in enumerate(self.options[each]):
                self.costs[each, place] = cost(option, choices.shapes[each])

    def seconds(self, pick: Pick) -> float:
        """The cost of a choice."""
        needed = self.needed(pick)
        total = sum(self.held[c] for c in needed if c in self.held)
        for each in needed:
            if each in self.options:
                cost = self.cost(each, pick[each])
                inside = any(i in self.options and self.cost(i, pick[i]).fusable for i in pick[each].inputs)
                total += cost.seconds + _LEAST + (0.0 if inside else cost.alone)
        return total

    def cost(self, each: int, option: ENode) -> Cost:
        return self.costs[each, self.options[each].index(option)]

    def needed(self, pick: Pick) -> list[int]:
        """The classes that the outputs need, operands first. Raises ValueError for a choice that is a cycle."""
        order: list[int] = []
        state: dict[int, int] = {}
        stack = [(root, False) for root in reversed(self.choices.roots)]
        while stack:
            each, done = stack.pop()
            if done:
                state[each] = 2
                order.append(each)
            elif state.get(each) == 1:
                raise ValueError("the choice must not be a cycle")
            elif each not in state:
                state[each] = 1
                stack.append((each, True))
                if each not in self.constants:
                    for source in reversed(pick[each].inputs):
                        if state.get(source) == 1:
                            raise ValueError("the choice must not be a cycle")
                        stack.append((source, False))
        return order


def extract(problem: Problem, *, count: int = 1, work: float = math.inf, seconds: float = PATIENCE) -> Extracted:
    """Up to ``count`` choices, best first; the best is no worse than the greedy one and the original graph.

    The first is optimal if HiGHS proves that within its limits. Each further one differs from all before in the
    products that it computes. ``work`` bounds the work, and ``seconds`` the time, as in
    :class:`~mlc.substitution.egraph.Limits`.
    """
    found = [Extraction(pick, problem.seconds(pick), how) for pick, how in (
        (problem.choices.original, "original"), (greedy(problem), "greedy")
    ) if _complete(problem, pick)]
    program = _Program(problem, work, time.monotonic() + seconds)
    for _ in range(count):
        pick = program.solve()
        if pick is None:
            break
        found.append(Extraction(pick, problem.seconds(pick), "program"))
        program.exclude(pick)
    distinct = {_products(problem, e.pick): e for e in sorted(found, key=lambda e: -e.seconds)}
    return Extracted(sorted(distinct.values(), key=lambda e: e.seconds)[:count], program.work, program.stopped)


def greedy(problem: Problem) -> Pick:
    """For each class the option with the cheapest tree: acyclic, but ignorant of sharing."""
    best: dict[int, tuple[float, int]] = {}
    readers: dict[int, set[int]] = {}
    for each, options in problem.options.items():
        for option in options:
            for source in option.inputs:
                readers.setdefault(source, set()).add(each)
    pending = set(problem.options)
    while pending:
        each = min(pending)
        pending.discard(each)
        for place, option in enumerate(problem.options[each]):
            if all(i in best or i in problem.constants for i in option.inputs):
                cost = problem.costs[each, place]
                below = sum(best[i][0] for i in option.inputs if i in best)
                inside = any(problem.costs[i, best[i][1]].fusable for i in option.inputs if i in best)
                total = cost.seconds + _LEAST + (0.0 if inside else cost.alone) + below
                if each not in best or total < best[each][0] * (1 - 1e-12):
                    best[each] = (total, place)
                    pending |= readers.get(each, set())
    return {each: problem.options[each][place] for each, (_, place) in best.items()}


def as_terms(problem: Problem, pick: Pick) -> TermGraph:
    """The chosen graph."""
    build, places = TermBuilder(), dict[int, int]()

    def of_constant(each: int) -> int:
        if each not in places:
            option = problem.constants[each]
            inputs = tuple(of_constant(i) for i in option.inputs)
            places[each] = build.put(Term(option.op, inputs, option.attributes, problem.choices.shapes[each]))
        return places[each]

    for each in problem.needed(pick):
        if each in problem.constants:
            of_constant(each)
        else:
            option = pick[each]
            inputs = tuple(places[i] for i in option.inputs)
            places[each] = build.put(Term(option.op, inputs, option.attributes, problem.choices.shapes[each]))
    return build.graph([places[root] for root in problem.choices.roots])


class _Program:
    """Variables from 0 to 1: an option is taken; a constant is kept; an elementwise option is a kernel of its own."""

    def __init__(self, problem: Problem, work: float, deadline: float) -> None:
        self._problem, self._allowed, self._deadline = problem, work, deadline
        self.work = 0.0
        self.stopped: str | None = None
        self._weights: list[float] = []
        self._whole: list[int] = []
        self._rows: list[tuple[dict[int, float], float]] = []  # sum(row) <= bound
        self._taken: dict[tuple[int, int], int] = {}
        for key, cost in problem.costs.items():
            self._taken[key] = self._variable(cost.seconds + _LEAST, 1)
        self._kept = {c: self._variable(seconds, 0) for c, seconds in problem.held.items()}
        for root in problem.choices.roots:
            if root in problem.options:
                self._rows.append((dict.fromkeys(self._ways(root), -1.0), -1.0))
        self._constrain()

    def _variable(self, seconds: float, whole: int) -> int:
        self._weights.append(seconds * 1e6)
        self._whole.append(whole)
        return len(self._weights) - 1

    def _ways(self, each: int) -> list[int]:
        return [self._taken[each, place] for place in range(len(self._problem.options[each]))]

    def _constrain(self) -> None:
        problem = self._problem
        for each, options in problem.options.items():
            if len(options) > 1:
                self._rows.append((dict.fromkeys(self._ways(each), 1.0), 1.0))
            readers: dict[int, dict[int, float]] = {}
            for place, option in enumerate(options):
                taken = self._taken[each, place]
                for source in dict.fromkeys(option.inputs):
                    readers.setdefault(source, {})[taken] = 1.0
                alone = problem.costs[each, place].alone
                if alone:
                    inside = {
                        self._taken[i, p]: -1.0 for i in option.inputs if i in problem.options
                        for p in range(len(problem.options[i])) if problem.costs[i, p].fusable
                    }
                    self._rows.append(({taken: 1.0, self._variable(alone, 0): -1.0, **inside}, 0.0))
            for source, row in readers.items():  # at most one of the options is taken
                there = self._ways(source) if source in problem.options else [self._kept[source]]
                self._rows.append(({**row, **dict.fromkeys(there, -1.0)}, 0.0))

    def exclude(self, pick: Pick) -> None:
        """Cut off every choice with the same products."""
        problem, products = self._problem, _products(self._problem, pick)
        row: dict[int, float] = {}
        for each, options in problem.options.items():
            for place, option in enumerate(options):
                if _is_product(option):
                    row[self._taken[each, place]] = 1.0 if (each, option) in products else -1.0
        self._rows.append((row, len(products) - 1.0))

    def solve(self) -> Pick | None:
        """The cheapest choice that is left; None where there is none, or where it would take more work than is left."""
        for _ in range(_MAX_CUTS):
            work = _SOLVING * sum(len(row) for row, _ in self._rows) ** 2
            if self.work + work > self._allowed:
                self.stopped = "work"
                return None
            self.work += work
            found = self._solved()
            if found is None:
                return None
            cycle = self._cycle(found)
            if not cycle:
                return found
            self._rows.append((dict.fromkeys(cycle, 1.0), len(cycle) - 1.0))
        return None

    def _solved(self) -> Pick | None:
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            self.stopped = "seconds"
            return None
        rows = self._rows
        entries = [(r, column, weight) for r, (row, _) in enumerate(rows) for column, weight in row.items()]
        if not entries:
            return {}
        from scipy.optimize import Bounds, LinearConstraint, milp  # takes a quarter of a second
        from scipy.sparse import csr_array

        places, columns, weights = (np.array(each) for each in zip(*entries, strict=True))
        matrix = csr_array((weights, (places, columns)), shape=(len(rows), len(self._weights)))
        found = milp(
            np.array(self._weights), integrality=np.array(self._whole), bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, -np.inf, np.array([limit for _, limit in rows])),
            options={"time_limit": left, "mip_rel_gap": _GAP, "node_limit": _NODES},
        )
        if time.monotonic() > self._deadline:
            self.stopped = "seconds"
        if found.x is None:
            return None
        return {
            each: self._problem.options[each][place]
            for (each, place), variable in self._taken.items() if found.x[variable] > 0.5
        }

    def _cycle(self, pick: Pick) -> list[int]:
        """The variables of the options along a cycle; empty without one."""
        state: dict[int, int] = {}
        for root in self._problem.choices.roots:
            path: list[int] = []
            stack = [(root, False)]
            while stack:
                each, done = stack.pop()
                if done:
                    state[each] = 2
                    path.pop()
                elif state.get(each) == 1:
                    loop = path[path.index(each) :]
                    return [self._taken[c, self._problem.options[c].index(pick[c])] for c in loop]
                elif each not in state and each in pick:
                    state[each] = 1
                    path.append(each)
                    stack.append((each, True))
                    stack += [(source, False) for source in pick[each].inputs if state.get(source) != 2]
        return []


def _is_product(option: ENode) -> bool:
    return option.op in PRODUCTS


def _products(problem: Problem, pick: Pick) -> frozenset[tuple[int, ENode]]:
    """What takes time in a choice: its products, or its outputs if it has none."""
    needed = [each for each in problem.needed(pick) if each in problem.options]
    found = frozenset((each, pick[each]) for each in needed if _is_product(pick[each]))
    return found or frozenset((each, pick[each]) for each in needed)


def _complete(problem: Problem, pick: Pick) -> bool:
    try:
        return all(
            each in problem.constants or pick[each] in problem.options[each] for each in problem.needed(pick)
        )
    except (KeyError, ValueError):
        return False


def _order(option: ENode) -> tuple[str, str, tuple[int, ...]]:
    return option.op, str(option.attributes), option.inputs


def _reachable(choices: Choices) -> list[int]:
    seen = dict.fromkeys(choices.roots)
    pending = list(choices.roots)
    while pending:
        for option in choices.options[pending.pop()]:
            new = [source for source in dict.fromkeys(option.inputs) if source not in seen]
            seen.update(dict.fromkeys(new))
            pending += new
    return list(seen)


def _fewest(choices: Choices) -> dict[int, ENode]:
    """For each constant class, the option with the fewest operators; classes that nothing known computes are omitted.
    """
    best: dict[int, tuple[int, ENode]] = {}
    changed = True
    while changed:
        changed = False
        for each in sorted(choices.constant):
            for option in sorted(choices.options[each], key=_order):
                if all(i in best for i in option.inputs):
                    size = 1 + sum(best[i][0] for i in option.inputs) if option.inputs or not option.leaf else 0
                    if each not in best or size < best[each][0]:
                        best[each], changed = (size, option), True
    return {each: option for each, (_, option) in best.items()}


def describe(extractions: Sequence[Extraction]) -> str:
    """The costs of choices in one line, for people."""
    return ", ".join(f"{e.how} {e.seconds * 1e6:.1f} us" for e in extractions)
