"""Divides large graphs into regions that are searched one by one, and puts them together again.

Regions are runs of the topological order, cut where the fewest tensors cross. Equal regions (the layers of a
transformer) are equal as term graphs, since their leaves are numbered afresh: what was found for one holds for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlc.substitution.terms import CONSTANT, INPUT, OPAQUE, Attributes, Term, TermBuilder, TermGraph, freeze

__all__ = ["Region", "joined", "split"]

#: a region is at least this part of the largest
_LEAST_PART = 3


@dataclass(frozen=True)
class Region:
    """``graph`` has leaves with ids of its own: those of ``inputs`` are places of the whole graph, those of
    ``constants`` and ``opaques`` the ids there. Its outputs are the places ``outputs``."""

    graph: TermGraph
    inputs: tuple[int, ...]
    constants: tuple[int, ...]
    opaques: tuple[int, ...]
    outputs: tuple[int, ...]


def split(graph: TermGraph, largest: int) -> list[Region]:
    """Regions of at most ``largest`` terms, in order; constants do not count and belong to every reader."""
    places = [p for p, term in enumerate(graph.terms) if term.op not in (INPUT, CONSTANT)]
    crossing = _crossing(graph, places)
    runs, start = [], 0
    while len(places) - start > largest:
        ends = range(start + max(1, largest // _LEAST_PART), start + largest + 1)
        end = min(ends, key=lambda e: (crossing[e], -e))
        runs.append(places[start:end])
        start = end
    runs.append(places[start:])
    whole = graph.whole_places()
    return [_region(graph, run, whole) for run in runs if run]


def _crossing(graph: TermGraph, places: Sequence[int]) -> list[int]:
    """How many of ``places`` before each position are read from it on."""
    order = {place: i for i, place in enumerate(places)}
    last = [i for i in range(len(places))]
    for place in places:
        for source in graph.terms[place].inputs:
            if source in order:
                last[order[source]] = order[place]
    for place in graph.outputs:
        if place in order:
            last[order[place]] = len(places)
    steps = [0] * (len(places) + 2)
    for i, end in enumerate(last):
        steps[i + 1] += 1
        steps[end + 1] -= 1
    total, found = 0, []
    for step in steps[: len(places) + 1]:
        total += step
        found.append(total)
    return found


def _region(graph: TermGraph, run: Sequence[int], whole: set[int]) -> Region:
    build, image = TermBuilder(), dict[int, int]()
    leaves: dict[str, dict[int, int]] = {INPUT: {}, CONSTANT: {}, OPAQUE: {}}
    inside = set(run)

    def leaf(place: int, number: int) -> Attributes:
        return freeze(id=number) if place in whole else freeze(id=number, whole=0)

    def at(place: int) -> int:
        if place not in image:
            term = graph.terms[place]
            op, name = (CONSTANT, term["id"]) if term.op == CONSTANT else (INPUT, place)
            number = leaves[op].setdefault(name, len(leaves[op]))
            image[place] = build.put(Term(op, (), leaf(place, number), term.shape))
        return image[place]

    for place in run:
        term = graph.terms[place]
        inputs, attributes = tuple(at(source) for source in term.inputs), term.attributes
        if term.op == OPAQUE:
            attributes = leaf(place, leaves[OPAQUE].setdefault(term["id"], len(leaves[OPAQUE])))
        image[place] = build.put(Term(term.op, inputs, attributes, term.shape))
    readers = graph.readers()
    outputs = tuple(p for p in run if p in graph.outputs or any(r not in inside for r in readers[p]))
    inputs, constants, opaques = (tuple(leaves[op]) for op in (INPUT, CONSTANT, OPAQUE))
    return Region(build.graph([image[p] for p in outputs]), inputs, constants, opaques, outputs)


def joined(graph: TermGraph, regions: Sequence[Region], replacements: Sequence[TermGraph]) -> TermGraph:
    """The whole graph with each region's terms replaced by those of a graph with the same leaves and outputs."""
    build, image = TermBuilder(), dict[int, int]()
    for place, term in enumerate(graph.terms):
        if term.op in (INPUT, CONSTANT):
            image[place] = build.put(term)
    leaves = {(term.op, term["id"]): term.attributes for term in graph.terms if term.leaf}
    for region, new in zip(regions, replacements, strict=True):
        names = {CONSTANT: region.constants, OPAQUE: region.opaques}
        own: list[int] = []
        for term in new.terms:
            if term.op == INPUT:
                own.append(image[region.inputs[term["id"]]])
                continue
            attributes = leaves[term.op, names[term.op][term["id"]]] if term.op in names else term.attributes
            own.append(build.put(Term(term.op, tuple(own[i] for i in term.inputs), attributes, term.shape)))
        for place, output in zip(region.outputs, new.outputs, strict=True):
            image[place] = own[output]
    return build.graph([image[place] for place in graph.outputs]).live()
