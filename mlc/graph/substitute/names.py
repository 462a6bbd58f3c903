"""Names for the terms that rules introduce: those of the terms of the model's own graph that they replace.

A rewritten graph is the model's own but for what rules changed. Terms are told by constants that nothing else reads in
this way (a layer's own weights), by what they read, and by what reads them, from there.
"""

from __future__ import annotations

from collections import defaultdict

from mlc.graph.substitute.read import Reading
from mlc.substitution.terms import CONSTANT, Term, TermGraph

__all__ = ["names"]


def names(reading: Reading, graph: TermGraph) -> dict[int, str]:
    """The names of the variables that places of ``graph`` stand for, as far as that can be told."""
    own = reading.graph
    image = _weighted(own, graph)
    image.update(zip(graph.outputs, own.outputs, strict=True))
    _forwards(own, graph, image)
    _backwards(own, graph, image)
    _forwards(own, graph, image)
    called = {place: str(var.name) for var, place in reading.places.items()}
    return {place: called[before] for place, before in image.items() if before in called}


def _weighted(own: TermGraph, graph: TermGraph) -> dict[int, int]:
    """Terms that alone in both graphs do this with these constants."""
    ours, theirs = _by_constants(own), _by_constants(graph)
    return {theirs[key][0]: places[0] for key, places in ours.items() if len(places) == len(theirs.get(key, ())) == 1}


def _by_constants(graph: TermGraph) -> dict[tuple[object, ...], list[int]]:
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, term in enumerate(graph.terms):
        read = (graph.terms[source] for source in term.inputs)
        constants = tuple(each["id"] if each.op == CONSTANT else None for each in read)
        if any(each is not None for each in constants):
            found[term.op, term.attributes, constants].append(place)
    return found


def _forwards(own: TermGraph, graph: TermGraph, image: dict[int, int]) -> None:
    """Terms that do the same with what stands for the same."""
    known = {(t.op, t.attributes, t.inputs): place for place, t in enumerate(own.terms)}
    for place, term in enumerate(graph.terms):
        if place not in image and all(source in image for source in term.inputs):
            before = known.get((term.op, term.attributes, tuple(image[source] for source in term.inputs)))
            if before is not None:
                image[place] = before


def _backwards(own: TermGraph, graph: TermGraph, image: dict[int, int]) -> None:
    """Terms that do the same for what stands for the same."""

    def alike(first: Term, second: Term) -> bool:
        return (first.op, first.attributes, first.shape) == (second.op, second.attributes, second.shape)

    for place in reversed(range(len(graph.terms))):
        if place not in image or not alike(graph.terms[place], own.terms[image[place]]):
            continue
        for source, before in zip(graph.terms[place].inputs, own.terms[image[place]].inputs, strict=True):
            if source not in image and alike(graph.terms[source], own.terms[before]):
                image[source] = before
