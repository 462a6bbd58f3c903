"""Chooses among the graphs of a search: by an earlier decision of a tuning run, else by the prices of their tasks.

A search must be worth its time: there is none where a tuning run has decided for the model's own graph, nor where
:mod:`mlc.graph.substitute.gain_bound` shows that nothing could be gained. Nor may it keep a model from being compiled:
an error in the search becomes a warning, and the model's own graph is compiled.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import tvm

from mlc.config import get_int
from mlc.graph.ir.rewrite import op_name
from mlc.graph.substitute.check import same_where_changed
from mlc.graph.substitute.costs import Costs
from mlc.graph.substitute.gain_bound import gain_bound
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.price import Comparison, Price, compare
from mlc.graph.substitute.read import Reading, read
from mlc.graph.substitute.rules import Patterns, ready
from mlc.graph.substitute.search import Candidate, Found, Options, search
from mlc.graph.task import Task, versions
from mlc.graph.tasks import extract_tasks
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.sizes import in_scope
from mlc.substitution.terms import TermGraph
from mlc.target import Target

__all__ = ["MARGIN", "Decided", "Decision", "Substitutions", "choose", "digest", "failed", "find", "own_graph",
           "subject"]

_LOG = logging.getLogger("mlc.build")

#: a graph must take at most this fraction of the time of what it replaces, if the two were not both measured
MARGIN = 0.97
#: and if they were
MEASURED_MARGIN = 0.99
#: a graph is considered if its estimate is at least this much below that of the model's own
_PROMISING = 0.97


class Decided(Protocol):
    """A tuning run's decision: the digest of the chosen graph, the scale of the search that finds it, and the measured
    times of whole models, for the model's own graph and the best other one; None if they were not measured."""

    @property
    def graph(self) -> str: ...
    @property
    def scale(self) -> Mapping[str, float]: ...
    @property
    def own_seconds(self) -> float | None: ...
    @property
    def seconds(self) -> float | None: ...


@dataclass(frozen=True)
class Decision:
    """The choice among the graphs of a search; ``comparisons`` are with the model's own graph, by candidate.

    ``reason``: ``decided`` (by a tuning run), ``prices``, ``kept`` (no other graph is clearly faster), ``alone`` (the
    search found no other), ``hopeless`` (no search, since nothing could be gained) or ``untuned`` (no search, since
    graphs are chosen by estimate on CPUs only). ``decided`` is the tuning run's decision.
    """

    found: Found
    chosen: int
    comparisons: Mapping[int, Comparison]
    reason: str
    decided: Decided | None = None


@dataclass(frozen=True)
class Substitutions:
    """The rules that may be applied, and callbacks. ``decided`` returns a tuning run's decision about a subject, or
    None; ``notify`` receives the :class:`Decision`. ``options`` bounds the work of a search, and ``found_again`` that
    of a search which must find the graph that a tuning run has decided for."""

    patterns: Sequence[Pattern]
    options: Options = field(default_factory=Options)
    decided: Callable[[str], Decided | None] = lambda _subject: None
    notify: Callable[[Decision], None] = lambda _decision: None
    found_again: float = math.inf


def choose(
    mod: tvm.IRModule, target: Target, rules: Substitutions, price: Price | None,
    lower: Callable[[tvm.IRModule], tvm.IRModule], compile_options: CompileOptions = DEFAULT_OPTIONS,
) -> tvm.IRModule:
    """The lowered module of the chosen graph; ``lower`` runs the rest of the pipeline on a graph."""
    try:
        decision, lowered = _chosen(mod, target, rules, price, lower, compile_options)
    except Exception as error:
        lowered = lower(mod)  # errors that the model itself causes are raised here
        failed(error)
        return lowered
    rules.notify(decision)
    return lowered


def failed(error: Exception) -> None:
    """Warn that the search failed; raises ``error`` itself if ``MLC_DEBUG`` is set."""
    if get_int("MLC_DEBUG"):
        raise error
    lines = str(error).strip().splitlines() or [""]
    warnings.warn(f"substitutions must not fail, but they did ({type(error).__name__}: {lines[-1].strip()}); the "
                  "model's own graph is used; this is a defect in mlc: MLC_DEBUG=1 shows the trace", stacklevel=3)


def _chosen(
    mod: tvm.IRModule, target: Target, rules: Substitutions, price: Price | None,
    lower: Callable[[tvm.IRModule], tvm.IRModule], compile_options: CompileOptions,
) -> tuple[Decision, tvm.IRModule]:
    reading = read(mod["main"])
    decided = rules.decided(subject(reading, target, rules.patterns, compile_options))
    trusted = target.kind == "llvm" or decided is not None
    found = (find(mod, target, rules, decided, compile_options, reading=reading) if trusted
             else own_graph(mod, reading))
    lowered: dict[int, tvm.IRModule] = {}
    tasks: dict[int, list[Task]] = {}
    comparisons: dict[int, Comparison] = {}

    def taken(index: int) -> tvm.IRModule:
        if index not in lowered:
            lowered[index] = lower(found.module(found.candidates[index]))
        return lowered[index]

    named = next((i for i, c in enumerate(found.candidates) if decided and digest(c.graph) == decided.graph), None)
    if named is not None:
        chosen, reason = named, "decided"
    else:
        promising = [i for i, c in enumerate(found.candidates) if i
                     and c.estimate < _PROMISING * found.candidates[0].estimate]
        for place, i in enumerate([0, *promising] if promising else [], 1):
            _LOG.info("pricing graph %d of %d", place, 1 + len(promising))
            tasks[i] = extract_tasks(taken(i), target)
            if i:
                comparisons[i] = compare(tasks[i], tasks[0], price)
        chosen = max(comparisons, key=lambda i: (comparisons[i].saved, -i), default=0)
        won = bool(chosen) and clearly_faster(comparisons[chosen])
        chosen, reason = (chosen, "prices") if won else (0, _why_own(found, trusted))
    if chosen and same_where_changed(found.candidates[0].graph, found.candidates[chosen].graph) is False:
        raise AssertionError("the graph that was taken computes something else than the model's own")
    return Decision(found, chosen, comparisons, reason, decided), taken(chosen)


def _why_own(found: Found, trusted: bool) -> str:
    if not trusted:
        return "untuned"
    return "kept" if len(found.candidates) > 1 else "alone" if found.reports else "hopeless"


def find(
    mod: tvm.IRModule, target: Target, rules: Substitutions, decided: Decided | None = None,
    compile_options: CompileOptions = DEFAULT_OPTIONS, *, reading: Reading | None = None,
) -> Found:
    """The graphs to compare: only the model's own if a tuning run decided for it, or if nothing can be gained."""
    started = time.monotonic()
    reading = reading or read(mod["main"])
    own = reading.graph.live()
    patterns = ready(rules.patterns, (term.op for term in reading.graph.terms))
    if decided is not None and decided.graph == digest(own):
        return own_graph(mod, reading)
    if decided is None:
        costs = Costs(target.tvm, sum(array.nbytes for array in reading.constants), compile_options)
        if gain_bound(own, patterns, costs) < 1.0 - _PROMISING:
            return own_graph(mod, reading, time.monotonic() - started)
    _LOG.info("searching for other graphs of the model")
    options = rules.options
    if decided is not None:
        options = replace(options, scale=tuple(sorted(decided.scale.items())), work=rules.found_again)
    found = search(mod, patterns, target.tvm, options, compile_options, reading=reading)
    if found.late:
        warnings.warn(f"a search for other graphs of a model must take less than {options.seconds:g} s, but this one "
                      f"was stopped after {found.seconds:.0f} s: the build may be slower than another one of the same "
                      "model; build it again on a machine with less to do", stacklevel=3)
    return found


def own_graph(mod: tvm.IRModule, reading: Reading, seconds: float = 0.0) -> Found:
    """The result of a search that is not carried out: the model's own graph, with unknown estimate."""
    return Found(mod, reading, (Candidate(reading.graph.live(), math.nan),), (), seconds)


def clearly_faster(comparison: Comparison) -> bool:
    """Whether a graph is enough faster than the model's own to be chosen."""
    margin = MEASURED_MARGIN if comparison.basis == "log" else MARGIN
    return comparison.ours < margin * comparison.theirs


def digest(graph: TermGraph) -> str:
    """A hash that is equal for equal graphs, whatever the values of their constants."""
    return hashlib.sha256(repr((graph.terms, graph.outputs)).encode()).hexdigest()[:32]


def subject(
    reading: Reading, target: Target, patterns: Sequence[Pattern], compile_options: CompileOptions = DEFAULT_OPTIONS
) -> str:
    """The key of a decision: the model's graph, the target, the rules, the versions of everything else, the compile
    options, and which sizes are free."""
    names = [_operator(reading.bound[var]) for var in reading.opaques]
    said = patterns.name if isinstance(patterns, Patterns) else " ".join(pattern.rule.name for pattern in patterns)
    rules = hashlib.sha256(said.encode()).hexdigest()[:16]
    text = repr((digest(reading.graph.live()), names, target.canonical, rules, versions(), compile_options.canonical,
                 *sorted(map(str, in_scope().values()))))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _operator(value: Any) -> str:
    return op_name(value) if hasattr(value, "op") else type(value).__name__
