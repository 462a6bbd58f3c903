"""Report on substitutions: which rules were applied, what was gained, and the graph before and after."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.operators import OPERATORS
from mlc.report import format as fmt
from mlc.report.graph_svg import Box, drawing
from mlc.text import as_html

if TYPE_CHECKING:
    from mlc.graph.substitute.choose import Decision
    from mlc.graph.substitute.read import Reading
    from mlc.substitution.terms import TermGraph

__all__ = ["FILE", "changed", "facts", "joined", "letter", "lines", "write"]

FILE = "substitutions.html"
#: operators that a drawing shows at most
_LARGEST = 200
_REASONS = {
    "decided": "a tuning run has decided so",
    "prices": "its functions take less time",
    "kept": "none is clearly faster",
    "alone": "the rules that match make none that could be faster",
    "hopeless": "no search was made, since joining its products could gain next to nothing",
    "untuned": "other graphs are looked for when the model is tuned for this target",
}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:24px;color:#1c2430;background:#fff} table{border-collapse:collapse}
h1{font-size:1.5rem} h2{font-size:1.1rem} code{font:12px/1.45 ui-monospace,monospace}
td,th{padding:4px 12px;border-bottom:1px solid #d5dbe5;text-align:left;vertical-align:top}
.pair{display:flex;gap:24px;align-items:flex-start} .pair>div{flex:0 1 auto;overflow:auto;min-width:240px}
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
        "lost": decision.decided is not None and decision.reason != "decided",
        "search_seconds": round(found.seconds, 3),
        "candidates": [candidate(i) for i in range(len(found.candidates))],
        "regions": [{"reason": r.reason, "rounds": r.rounds, "nodes": r.nodes, "seconds": round(r.seconds, 3),
                     "matches": sum(r.matches.values())} for r in found.reports],
    }


def _measured(decision: Decision) -> dict[str, float] | None:
    """The times that the deciding tuning run measured on whole models."""
    decided = decision.decided
    if decision.reason != "decided" or decided is None or decided.own_seconds is None or decided.seconds is None:
        return None
    return {"own_seconds": decided.own_seconds, "seconds": decided.seconds}


def lines(document: Mapping[str, Any]) -> list[str]:
    """The report in a few lines for a terminal."""
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
    if document["lost"]:
        found.append("  a tuning run decided for a graph that this search did not find again; tune once more")
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


def changed(
    ours: TermGraph, theirs: TermGraph, groups: Mapping[int, int] | None = None, words: Mapping[str, str] | None = None,
) -> dict[int, Box]:
    """The operators of ``ours`` that ``theirs`` does not have, with what they read and what reads them.

    ``groups`` are the numbers of the groups that some of them belong to, ``words`` the names of leaves by operator and
    id, as ``opaque 3``."""
    same = _same(ours, theirs)
    marked = [place for place, term in enumerate(ours.terms) if place not in same and not term.leaf]
    readers = ours.readers()
    constant = ours.constant_places()
    shown = [p for p in marked if p not in constant][:_LARGEST]
    around = {s for p in shown for s in ours.terms[p].inputs} | {r for p in shown for r in readers[p]}
    places = sorted({*shown, *(p for p in around if p not in constant)})
    return {p: _box(ours, p, p in shown, (groups or {}).get(p), words or {}) for p in places}


def _same(ours: TermGraph, theirs: TermGraph) -> set[int]:
    """The places of ``ours`` with the same operator at the same place of ``theirs``: after the same operators, or
    before the same ones that an output or an operator that no rule knows is made by."""
    left, right = _names(ours), _names(theirs)
    known = set(right.values())
    found = {place for place, name in left.items() if name in known}
    opaque = {term["id"]: term.inputs for term in theirs.terms if term.op == "opaque"}
    pairs = list(zip(ours.outputs, theirs.outputs, strict=True))
    for term in ours.terms:
        if term.op == "opaque" and len(opaque.get(term["id"], ())) == len(term.inputs):
            pairs += zip(term.inputs, opaque[term["id"]], strict=True)
    seen = set[tuple[int, int]]()
    constants = ours.constant_places(), theirs.constant_places()
    while pairs:
        pair = place, other = pairs.pop()
        a, b = ours.terms[place], theirs.terms[other]
        weights = [[names[i] for i in t.inputs if i in constant] for t, names, constant in (
            (a, left, constants[0]), (b, right, constants[1]))]
        alike = (a.op, a.attributes, a.shape, len(a.inputs)) == (b.op, b.attributes, b.shape, len(b.inputs))
        if pair not in seen and not a.leaf and alike and weights[0] == weights[1]:
            seen.add(pair)
            found.add(place)
            pairs += zip(a.inputs, b.inputs, strict=True)
    return found


def joined(own: TermGraph, other: TermGraph) -> tuple[dict[int, int], dict[int, int]]:
    """The number of the joined product that each product of ``own`` is part of, and those of the joined ones by place.

    They are told by their weights, and where several have the same, by their order.
    """
    ours, theirs = _weighted(own, other), _weighted(other, own)
    by_weight: dict[int, list[int]] = {}
    for place, weights in theirs.items():
        for weight in weights:
            by_weight.setdefault(weight, []).append(place)
    alike: dict[frozenset[int], list[int]] = {}
    for place, weights in ours.items():
        alike.setdefault(weights, []).append(place)
    parts: dict[int, int] = {}
    for weights, places in alike.items():
        found = sorted(set.intersection(*(set(by_weight.get(weight, ())) for weight in weights)))
        if found:
            each = max(1, -(-len(places) // len(found)))
            parts |= {place: found[min(i // each, len(found) - 1)] for i, place in enumerate(places)}
    counts = Counter(parts.values())
    numbers = {place: number for number, place in enumerate(p for p in sorted(counts) if counts[p] > 1)}
    return {place: numbers[made] for place, made in parts.items() if made in numbers}, numbers


def _weighted(graph: TermGraph, other: TermGraph) -> dict[int, frozenset[int]]:
    """The products that ``other`` does not compute, with the constants that they are products with."""
    known, names, constant = set(_names(other).values()), _names(graph), graph.constant_places()

    def below(place: int) -> set[int]:
        term = graph.terms[place]
        return {term["id"]} if term.op == "constant" else {w for source in term.inputs for w in below(source)}

    found = {
        place: frozenset(w for source in term.inputs if source in constant for w in below(source))
        for place, term in enumerate(graph.terms)
        if not term.leaf and OPERATORS[term.op].product and names[place] not in known
    }
    return {place: weights for place, weights in found.items() if weights}


def letter(number: int) -> str:
    """A, B, ..., Z, A1, ..."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def _words(reading: Reading) -> dict[str, str]:
    """The model's names for inputs and for operators that no rule knows."""
    from mlc.graph.ir.rewrite import op_name

    named = {f"input {number}": var.name for number, var in enumerate(reading.inputs)}
    for number, var in enumerate(reading.opaques):
        value = reading.bound[var]
        name = op_name(value) if hasattr(value, "op") else type(value).__name__
        named[f"opaque {number}"] = name.rpartition(".")[2]
    return named


def _names(graph: TermGraph) -> dict[int, str]:
    """For each term, a name that is equal for equal computations."""
    found: dict[int, str] = {}
    for place, term in enumerate(graph.terms):
        inputs = [found[i] for i in term.inputs] if term.op != "opaque" else []  # their ids say what they are
        key = (term.op, str(term.attributes), inputs)
        found[place] = hashlib.sha256(repr(key).encode()).hexdigest()
    return found


def _box(graph: TermGraph, place: int, marked: bool, group: int | None, words: Mapping[str, str]) -> Box:
    term = graph.terms[place]
    given = dict(term.attributes)
    title = words.get(f"{term.op} {term['id']}", term.op) if term.leaf else term.op
    if term.op == "slice":
        title += f" {given['begin']}:{given['end']}"
    if term.op == "conv2d":
        rows, columns = graph.terms[term.inputs[1]].shape[2:]
        title += f" {rows}x{columns}"
    if group is not None:
        title += f"  {letter(group)}"
    more = ", ".join(f"{k} {v}" for k, v in term.attributes if k != "id")
    return Box(title, " x ".join(map(str, term.shape)), term.inputs, marked, group, more)


def write(folder: Path, name: str, decision: Decision) -> Path:
    """Write the page into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    document = facts(decision)
    own, taken = decision.found.candidates[0].graph, decision.found.candidates[decision.chosen].graph
    shown = decision.chosen or (1 if len(decision.found.candidates) > 1 else 0)
    other = decision.found.candidates[shown].graph
    parts = [f"<h1>Substitutions in {as_html(name)}</h1>",
             *(f"<p>{as_html(line.strip())}</p>" for line in _headlines(document)), _table(document)]
    if other != own:
        title = "after" if taken == other else "the best other graph, which is not taken"
        parts.append(_pair(own, other, _words(decision.found.reading), title))
        parts.append(_rules(document))
    path = folder / FILE
    path.write_text(f"<!doctype html><meta charset='utf-8'><title>Substitutions in {as_html(name)}</title>"
                    f"<style>{_STYLE}</style>{''.join(parts)}\n", encoding="utf-8")
    return path


def _pair(own: TermGraph, other: TermGraph, words: Mapping[str, str], title: str) -> str:
    """Both graphs side by side at one scale, products that became one in one colour and with one letter."""
    parts, made = joined(own, other)
    counts = Counter(parts.values())
    legend = ", ".join(f"{letter(number)}: {counts[number]}" for number in sorted(counts))
    drawn = [changed(own, other, parts, words), changed(other, own, made, words)]
    cut = f" Only the first {_LARGEST} are drawn." if any(
        sum(box.marked for box in boxes.values()) == _LARGEST for boxes in drawn) else ""
    joins = f" Products that become one have one colour and one letter ({legend} of them)." if counts else ""
    return (f'<p>Operators that differ are coloured; weights are left out.{joins}{cut}</p><div class="pair"><div>'
            f"<h2>before</h2>{drawing(drawn[0])}</div><div><h2>{title}</h2>"
            f"{drawing(drawn[1])}</div></div>")


def _rules(document: Mapping[str, Any]) -> str:
    """The text of each rule that contributed."""
    from mlc.substitution.codec import graph_text
    from mlc.substitution.shipped import shipped_rules

    shipped = {rule.name: rule for rule in shipped_rules()}
    rows = []
    for name in sorted({name for each in document["candidates"] for name in each["rules"]}):
        rule = shipped.get(name.removesuffix(" turned").partition(":")[0])
        if rule is not None:
            sides = [graph_text(rule.source), graph_text(rule.target)]
            source, target = reversed(sides) if name.endswith(" turned") else sides
            text = f"{as_html(source)}<br>&rarr; {as_html(target)}"
            rows.append(f"<tr><td>{as_html(name)}</td><td><code>{text}</code></td></tr>")
    return f"<h2>The rules</h2><table>{''.join(rows)}</table>" if rows else ""


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
                    f"<td>{as_html(gained)}</td><td>{'<br>'.join(map(as_html, rules))}</td></tr>")
    head = "<tr><th>graph</th><th>operators</th><th>expected</th><th>functions that differ</th><th>rules</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"
