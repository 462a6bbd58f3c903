"""What substitutions did to a model: which rules fired, what was gained, and the graph before and after."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.report import format as fmt
from mlc.report.graph_svg import Box, drawing

if TYPE_CHECKING:
    from mlc.graph.substitute.choose import Decision
    from mlc.graph.substitute.terms import TermGraph

__all__ = ["FILE", "changed", "facts", "lines", "write"]

FILE = "substitutions.html"
#: operators that a drawing shows at most
_LARGEST = 90
_REASONS = {
    "decided": "a tuning run has decided so",
    "prices": "its functions take less time",
    "kept": "none is clearly faster",
    "alone": "the rules that match make none that could be faster",
    "hopeless": "no search was made, since joining its products could gain next to nothing",
    "untuned": "other graphs are looked for when the model is tuned for this target",
}
_STYLE = """
body{font-family:sans-serif;margin:24px auto;max-width:1180px;color:#1c2430} table{border-collapse:collapse}
td,th{padding:4px 12px;border-bottom:1px solid #d5dbe5;text-align:left} .pair{display:flex;gap:24px;flex-wrap:wrap}
.pair>div{flex:1 1 520px;overflow:auto} svg{max-width:100%;height:auto}
"""


def facts(decision: Decision) -> dict[str, Any]:
    """The decision as JSON values."""
    found = decision.found

    def candidate(index: int) -> dict[str, Any]:
        each, comparison = found.candidates[index], decision.comparisons.get(index)
        own = None if comparison is None else {
            "basis": comparison.basis, "seconds": comparison.ours, "instead_of_seconds": comparison.theirs,
        }
        return {"operators": sum(not t.leaf for t in each.graph.terms), "estimate": each.estimate,
                "rules": dict(sorted(each.rules.items())), "tasks": own}

    return {
        "chosen": decision.chosen, "reason": decision.reason, "measured": _measured(decision),
        "search_seconds": round(found.seconds, 3),
        "candidates": [candidate(i) for i in range(len(found.candidates))],
        "regions": [{"reason": r.reason, "rounds": r.rounds, "nodes": r.nodes, "seconds": round(r.seconds, 3),
                     "matches": sum(r.matches.values())} for r in found.reports],
    }


def _measured(decision: Decision) -> dict[str, float] | None:
    """What the tuning run that decided saw when it timed whole models in turn."""
    decided = decision.decided
    if decision.reason != "decided" or decided is None or decided.own_seconds is None or decided.seconds is None:
        return None
    return {"own_seconds": decided.own_seconds, "seconds": decided.seconds}


def lines(document: Mapping[str, Any]) -> list[str]:
    """The same in a few lines for a terminal."""
    chosen, own = document["candidates"][document["chosen"]], document["candidates"][0]
    others, reason = len(document["candidates"]) - 1, _REASONS[document["reason"]]
    what = "another graph is taken" if document["chosen"] else "the model's own graph is kept"
    searched = f"; {others} {'other' if others == 1 else 'others'} found in {document['search_seconds']:.1f} s"
    found = [f"substitutions: {what}: {reason}{searched if document['regions'] else ''}"]
    if document["chosen"]:
        found += [f"  {count} x {name}" for name, count in chosen["rules"].items()]
        found.append(f"  {own['operators']} operators become {chosen['operators']}; estimated "
                     f"{fmt.seconds(own['estimate'])} -> {fmt.seconds(chosen['estimate'])}")
        tasks = chosen["tasks"]
        if tasks is not None:
            how = "measured" if tasks["basis"] == "log" else "estimated"
            found.append(f"  functions that differ, {how}: {fmt.seconds(tasks['instead_of_seconds'])} -> "
                         f"{fmt.seconds(tasks['seconds'])}")
    measured = document["measured"]
    if measured is not None:
        other = "the one that is taken" if document["chosen"] else "the best other one"
        found.append(f"  measured in turn as wholes: the model's own graph {fmt.seconds(measured['own_seconds'])}, "
                     f"{other} {fmt.seconds(measured['seconds'])}")
    return found


def _headlines(document: Mapping[str, Any]) -> list[str]:
    """The lines whose figures the table lacks."""
    first, *others = lines(document)
    return [first.removeprefix("substitutions: "), *(line for line in others if "as wholes" in line)]


def changed(ours: TermGraph, theirs: TermGraph) -> dict[int, Box]:
    """The operators of ``ours`` that ``theirs`` does not compute, with what they read and what reads them."""
    known = set(_names(theirs).values())
    names = _names(ours)
    marked = [place for place, term in enumerate(ours.terms) if names[place] not in known and not term.leaf]
    readers = ours.readers()
    constant = ours.constant_places()
    shown = [p for p in marked if p not in constant][:_LARGEST]
    around = {s for p in shown for s in ours.terms[p].inputs} | {r for p in shown[:_LARGEST] for r in readers[p]}
    places = sorted({*shown, *(p for p in around if p not in constant)})
    return {p: _box(ours, p, p in shown) for p in places}


def _names(graph: TermGraph) -> dict[int, str]:
    """For each place a name that is equal for equal computations."""
    found: dict[int, str] = {}
    for place, term in enumerate(graph.terms):
        key = (term.op, str(term.attributes), [found[i] for i in term.inputs])
        found[place] = hashlib.sha256(repr(key).encode()).hexdigest()
    return found


def _box(graph: TermGraph, place: int, marked: bool) -> Box:
    term = graph.terms[place]
    given = {k: v for k, v in term.attributes if k in ("axis", "begin", "end", "groups", "stride", "kernel")}
    detail = " x ".join(map(str, term.shape))
    if term.op in ("slice", "concat"):
        detail += " " + " ".join(f"{k}={v}" for k, v in given.items())
    if term.op == "conv2d":
        rows, columns = graph.terms[term.inputs[1]].shape[2:]
        detail += f"  {rows}x{columns} filter"
    return Box(term.op, detail, term.inputs, marked)


def write(folder: Path, name: str, decision: Decision) -> Path:
    """Write the page into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    document = facts(decision)
    own, taken = decision.found.candidates[0].graph, decision.found.candidates[decision.chosen].graph
    shown = decision.chosen or (1 if len(decision.found.candidates) > 1 else 0)
    other = decision.found.candidates[shown].graph
    parts = [f"<h1>Substitutions in {escape(name)}</h1>", *(f"<p>{escape(line.strip())}</p>" for line in _headlines(document))]
    parts.append(_table(document))
    if other != own:
        title = "after" if taken == other else "the best other graph, which is not taken"
        parts.append(
            '<div class="pair"><div><h2>before</h2>' + drawing(changed(own, other)) + f"</div><div><h2>{title}</h2>"
            + drawing(changed(other, own)) + "</div></div>"
            "<p>Operators that differ are marked; weights are left out.</p>"
        )
    path = folder / FILE
    path.write_text(f"<!doctype html><meta charset='utf-8'><title>Substitutions in {escape(name)}</title>"
                    f"<style>{_STYLE}</style>{''.join(parts)}\n", encoding="utf-8")
    return path


def _table(document: Mapping[str, Any]) -> str:
    rows = []
    for index, each in enumerate(document["candidates"]):
        tasks = each["tasks"]
        gained = "" if tasks is None else (
            f"{fmt.seconds(tasks['instead_of_seconds'])} → {fmt.seconds(tasks['seconds'])} ({tasks['basis']})"
        )
        rules: Sequence[str] = [f"{count} × {name}" for name, count in each["rules"].items()]
        label = "the model's own" if not index else f"graph {index}"
        mark = " (taken)" if index == document["chosen"] else ""
        rows.append(f"<tr><td>{label}{mark}</td><td>{each['operators']}</td><td>{fmt.seconds(each['estimate'])}</td>"
                    f"<td>{escape(gained)}</td><td>{'<br>'.join(map(escape, rules))}</td></tr>")
    head = "<tr><th>graph</th><th>operators</th><th>expected</th><th>functions that differ</th><th>rules</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"
