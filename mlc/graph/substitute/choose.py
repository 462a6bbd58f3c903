"""The choice between the graphs of a search: by what was decided before, else by the prices of their tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm

from mlc.graph.rewrite import op_name
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.price import Comparison, Price, compare
from mlc.graph.substitute.read import Reading, read
from mlc.graph.substitute.search import Found, Options, search
from mlc.graph.substitute.terms import TermGraph
from mlc.graph.task import Task, versions
from mlc.graph.tasks import extract_tasks
from mlc.target import Target

__all__ = ["Decision", "Substitutions", "choose", "decision_text", "digest", "read_decision", "subject"]

#: part of the time that a graph may take at most of what it saves on, where nobody has measured both
MARGIN = 0.97
#: and where the log has
MEASURED_MARGIN = 0.99
#: a graph is looked at if its estimate is at least this much below that of the model's own
_PROMISING = 0.97


@dataclass(frozen=True)
class Decision:
    """What was found and which candidate is taken; ``comparisons`` are with the model's own graph, by candidate.

    ``reason``: ``decided`` (a tuning run has), ``prices``, ``kept`` (no other graph is clearly faster) or ``alone``.
    """

    found: Found
    chosen: int
    comparisons: Mapping[int, Comparison]
    reason: str


@dataclass(frozen=True)
class Substitutions:
    """What may be substituted, and who is told. ``decided`` gives what a tuning run decided about a subject: the
    digest of the graph to take and the scale of the search that found it, or None; ``notify`` gets the decision."""

    patterns: Sequence[Pattern]
    options: Options = field(default_factory=Options)
    decided: Callable[[str], tuple[str, Mapping[str, float]] | None] = lambda _subject: None
    notify: Callable[[Decision], None] = lambda _decision: None


def choose(
    mod: tvm.IRModule, target: Target, rules: Substitutions, price: Price | None,
    lower: Callable[[tvm.IRModule], tvm.IRModule], *, winograd: bool = True,
) -> tvm.IRModule:
    """The lowered module of the graph that is taken. ``lower`` does the rest of the pipeline with a graph."""
    reading = read(mod["main"])
    decided = rules.decided(subject(reading, target, rules.patterns))
    options = replace(rules.options, scale=tuple(sorted(decided[1].items()))) if decided else rules.options
    found = search(mod, rules.patterns, target.tvm, options, winograd=winograd, reading=reading)
    lowered: dict[int, tvm.IRModule] = {}
    tasks: dict[int, list[Task]] = {}
    comparisons: dict[int, Comparison] = {}

    def taken(index: int) -> tvm.IRModule:
        if index not in lowered:
            lowered[index] = lower(found.module(found.candidates[index]))
        return lowered[index]

    named = next((i for i, c in enumerate(found.candidates) if decided and digest(c.graph) == decided[0]), None)
    if named is not None:
        chosen, reason = named, "decided"
    else:
        promising = [i for i, c in enumerate(found.candidates) if i
                     and c.estimate < _PROMISING * found.candidates[0].estimate]
        for i in [0, *promising] if promising else []:
            tasks[i] = extract_tasks(taken(i), target)
            if i:
                comparisons[i] = compare(tasks[i], tasks[0], price)
        chosen = max(comparisons, key=lambda i: (comparisons[i].saved, -i), default=0)
        won = bool(chosen) and clearly_faster(comparisons[chosen])
        chosen, reason = (chosen, "prices") if won else (0, "kept" if len(found.candidates) > 1 else "alone")
    rules.notify(Decision(found, chosen, comparisons, reason))
    return taken(chosen)


def clearly_faster(comparison: Comparison) -> bool:
    """Whether a graph beats the model's own by enough to be taken."""
    margin = MEASURED_MARGIN if comparison.basis == "log" else MARGIN
    return comparison.ours < margin * comparison.theirs


def digest(graph: TermGraph) -> str:
    """Equal for equal graphs, whatever their constants hold."""
    return hashlib.sha256(repr((graph.terms, graph.outputs)).encode()).hexdigest()[:32]


def subject(reading: Reading, target: Target, patterns: Sequence[Pattern]) -> str:
    """What a decision is about: the model's graph, the target, the rules and the versions of everything else."""
    names = [_operator(reading.bound[var]) for var in reading.opaques]
    rules = hashlib.sha256(" ".join(pattern.rule.name for pattern in patterns).encode()).hexdigest()[:16]
    text = repr((digest(reading.graph.live()), names, target.canonical, rules, versions()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def decision_text(graph: str, scale: Mapping[str, float]) -> str:
    """A decision as the log keeps it: the digest of the graph, and the scale of the search that finds it."""
    return json.dumps({"graph": graph, "scale": dict(sorted(scale.items()))})


def read_decision(text: bytes | None) -> tuple[str, dict[str, float]] | None:
    """What :func:`decision_text` wrote; None for anything else."""
    try:
        data = json.loads(text or b"")
        return str(data["graph"]), {str(k): float(v) for k, v in data["scale"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _operator(value: Any) -> str:
    return op_name(value) if hasattr(value, "op") else type(value).__name__
