"""The search over a whole model: terms, regions, saturation, extraction; the results are the graphs worth building.

A region in which constants can be folded is searched in two steps: first with the rules that have one output, which
fold constants into each other and merge branches; then the result with all rules, including those that join products of
one tensor. Both at once would join products that folding removes. If folding is not clearly better, the region's own
graph is searched with all rules as well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import tvm

from mlc.graph.substitute.costs import Costs
from mlc.graph.substitute.extract import Extraction, Problem, as_terms, extract
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.read import Reading, read
from mlc.graph.substitute.rules import uncollected
from mlc.graph.substitute.saturate import Report, folds, saturate
from mlc.graph.substitute.slices import merged_slices
from mlc.graph.substitute.split import Region, joined, split
from mlc.graph.substitute.write import write
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.substitution.egraph import PATIENCE, Limits
from mlc.substitution.rule import Rule
from mlc.substitution.terms import TermGraph
from mlc.substitution.trust import trusted

__all__ = ["Candidate", "Found", "Options", "search"]

#: the folded graph is searched further if its time is at most this fraction of the original
_WORTH = 0.99
#: and only it, if at most this fraction; otherwise the original graph is searched too, with this part of the work
_DECISIVE, _OWN_PART = 0.6, 0.75
#: part of the work that saturation may do, before extraction
_SATURATING = 0.5


@dataclass(frozen=True)
class Options:
    """Limits of a search: ``largest`` is the number of terms in a region, ``nodes`` the size of its e-graph, ``work``
    the bound for all regions together, and ``candidates`` the number of graphs to propose besides the model's own.

    ``seconds`` ends a search that hangs, as in :class:`~mlc.substitution.egraph.Limits`. ``scale`` is that of
    :class:`Costs`. Of the networks that ship, an unrolled LSTM takes the most work, half of the default.
    """

    largest: int = 300
    nodes: int = 3_000
    work: float = 1.2e6
    seconds: float = PATIENCE
    candidates: int = 2
    scale: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A graph: the model's own, or one that rules make of it. ``estimate`` is the estimated time in seconds, as
    extraction adds it up; ``rules`` is how many of its operators each rule introduced."""

    graph: TermGraph
    estimate: float
    rules: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The result of a search. ``candidates`` begin with the model's own graph; ``reports`` are of the distinct regions.
    """

    mod: tvm.IRModule
    reading: Reading
    candidates: tuple[Candidate, ...]
    reports: tuple[Report, ...]
    seconds: float

    @property
    def late(self) -> bool:
        """Whether a time limit ended the search early."""
        return any(report.reason == "seconds" for report in self.reports)

    def module(self, candidate: Candidate) -> tvm.IRModule:
        """The module whose main is a candidate; the module itself for its own graph."""
        if candidate.graph == self.candidates[0].graph:
            return self.mod
        return write(self.mod, self.reading, candidate.graph)


def search(
    mod: tvm.IRModule, patterns: Sequence[Pattern], target: tvm.target.Target, options: Options | None = None,
    compile_options: CompileOptions = DEFAULT_OPTIONS, *, reading: Reading | None = None,
) -> Found:
    """The cheap graphs that ``patterns`` make of a simplified module's main.

    The result is the same on every machine, unless ``seconds`` run out. If it contains more than the model's own graph,
    the certificates of all applied rules have been checked: if some are invalid, all certificates are checked, and the
    search is repeated without the rules whose certificates are invalid.
    """
    reading = reading or read(mod["main"])
    while True:
        try:
            found, applied = _searched(mod, patterns, target, options or Options(), compile_options, reading)
        except Exception:  # a wrong rule may cause any error
            wrong = _wrong(pattern.proved for pattern in patterns)
            if not wrong:
                raise
        else:
            if not _wrong(applied):
                return found
            wrong = _wrong(pattern.proved for pattern in patterns)  # all, or each search finds one more
        patterns = [pattern for pattern in patterns if id(pattern.proved) not in wrong]


def _wrong(rules: Iterable[Rule]) -> set[int]:
    """The identities of rules with invalid certificates."""
    with uncollected():
        return {each for each, rule in {id(rule): rule for rule in rules}.items() if not trusted(rule)}


def _searched(
    mod: tvm.IRModule, patterns: Sequence[Pattern], target: tvm.target.Target, options: Options,
    compile_options: CompileOptions, reading: Reading,
) -> tuple[Found, list[Rule]]:
    """The graphs found, and the rules that they depend on whose certificates were not checked."""
    started = time.monotonic()
    weights = sum(array.nbytes for array in reading.constants)
    costs = Costs(target, weights, compile_options, scale=dict(options.scale))
    whole = reading.graph.live()
    regions = split(whole, options.largest)
    distinct = list(dict.fromkeys(region.graph for region in regions))
    solved: dict[TermGraph, _Solved] = {}
    for number, graph in enumerate(distinct):
        left = max(0.0, options.work - sum(each.report.work for each in solved.values()))
        solved[graph] = _solve(graph, patterns, costs, replace(
            options, work=left / (len(distinct) - number), seconds=options.seconds - (time.monotonic() - started)))
    found = Found(mod, reading, tuple(_candidates(whole, regions, solved, options.candidates)),
                  tuple(each.report for each in solved.values()), time.monotonic() - started)
    applied = [rule for each in solved.values() if any(one.graph != each.original.graph for one in each.choices)
               for rule in each.report.unproved]
    return found, applied if len(found.candidates) > 1 else []


@dataclass(frozen=True)
class _Choice:
    """A graph for a region, its cost in seconds, and how many of its operators each rule introduced."""

    graph: TermGraph
    seconds: float
    rules: Counter[str]


@dataclass(frozen=True)
class _Solved:
    """``original`` is the region's own graph, ``choices`` are others, best first."""

    original: _Choice
    choices: list[_Choice]
    report: Report

    def choice(self, rank: int) -> _Choice:
        """The choice of a rank, or the last; the region's own graph where none is better."""
        return self.choices[min(rank, len(self.choices) - 1)] if self.choices else self.original


def _solve(graph: TermGraph, patterns: Sequence[Pattern], costs: Costs, options: Options) -> _Solved:
    started = time.monotonic()
    if not folds(graph, patterns):
        return _saturated(graph, patterns, costs, options)
    folding = [pattern for pattern in patterns if not pattern.joins]
    first = _saturated(graph, folding, costs, replace(options, candidates=1, work=options.work / 2))
    folded = first.choices[0] if first.choices else first.original
    if folded.seconds > _WORTH * first.original.seconds:
        folded = first.original
    own = folded is first.original or folded.seconds > _DECISIVE * first.original.seconds
    report, choices = first.report, {each.graph: each for each in (first.original, folded)}
    for begin in dict.fromkeys((*([graph] if own else []), folded.graph)):
        left = max(0.0, options.work - report.work) * (1.0 if begin == folded.graph else _OWN_PART)
        found = _saturated(begin, patterns, costs, replace(
            options, work=left, seconds=options.seconds - (time.monotonic() - started)))
        report = _both(report, found.report)
        for each in (choice for choice in found.choices if choice.rules):
            rules = each.rules if begin == graph else each.rules + folded.rules
            choices.setdefault(each.graph, replace(each, rules=rules))
    best = sorted(choices.values(), key=lambda each: each.seconds)
    return _Solved(first.original, best[: options.candidates], report)


def _both(first: Report, second: Report) -> Report:
    """Merge the reports of two searches, the second of which continues the first."""
    matches = Counter(first.matches) + Counter(second.matches)
    reason = next((each for each in ("seconds", "work") if each in (first.reason, second.reason)), second.reason)
    return Report(reason, first.rounds + second.rounds, max(first.nodes, second.nodes), first.work + second.work,
                  first.seconds + second.seconds, dict(matches), first.unproved + second.unproved)


def _saturated(graph: TermGraph, patterns: Sequence[Pattern], costs: Costs, options: Options) -> _Solved:
    limits = Limits(nodes=options.nodes, work=options.work * _SATURATING, seconds=options.seconds)
    choices, report = saturate(graph, patterns, limits)
    problem = Problem(choices, lambda o, s: costs.of(o, s, choices.shapes, choices.constant), costs.held)
    original = _Choice(graph, problem.seconds(choices.original), Counter())
    if not report.matches:
        return _Solved(original, [], report)
    found = extract(problem, count=options.candidates, work=options.work - report.work,
                    seconds=options.seconds - report.seconds)
    report = replace(report, work=report.work + found.work, reason=found.stopped or report.reason)
    return _Solved(original, [
        _Choice(merged_slices(as_terms(problem, each.pick)), each.seconds, _rules(problem, each))
        for each in found.choices
    ], report)


def _candidates(
    whole: TermGraph, regions: Sequence[Region], solved: dict[TermGraph, _Solved], count: int
) -> list[Candidate]:
    found = [Candidate(whole, sum(solved[r.graph].original.seconds for r in regions))]
    for rank in range(count):
        picks = {graph: each.choice(rank) for graph, each in solved.items()}
        rules: Counter[str] = Counter()
        for region in regions:
            rules += picks[region.graph].rules
        graph = joined(whole, regions, [picks[region.graph].graph for region in regions])
        if rules and all(graph != other.graph for other in found):
            found.append(Candidate(graph, sum(picks[r.graph].seconds for r in regions), dict(rules)))
    return found


def _rules(problem: Problem, choice: Extraction) -> Counter[str]:
    """How many of the chosen operators each rule introduced."""
    taken = [(each, choice.pick[each]) for each in problem.needed(choice.pick) if each in problem.options]
    rules = (problem.choices.options[each][node] for each, node in taken if problem.choices.original.get(each) != node)
    return Counter(rule for rule in rules if rule is not None)
