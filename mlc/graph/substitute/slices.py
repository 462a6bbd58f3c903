"""Simplifies an extracted graph: slices of slices, which pairwise joining creates, become slices."""

from __future__ import annotations

from dataclasses import replace

from mlc.substitution.terms import Term, TermBuilder, TermGraph, freeze

__all__ = ["merged_slices"]


def merged_slices(graph: TermGraph) -> TermGraph:
    """``slice(slice(x, b, e), c, d) --> slice(x, b + c, b + d)`` along one axis; a slice of all of it is left out."""
    build = TermBuilder()
    image: list[int] = []
    for term in graph.terms:
        term = replace(term, inputs=tuple(image[i] for i in term.inputs))
        if term.op == "slice":
            term = _sliced(build, term)
            source = build.terms[term.inputs[0]]
            if source.shape == term.shape:
                image.append(term.inputs[0])
                continue
        image.append(build.put(term))
    return build.graph([image[place] for place in graph.outputs]).live()


def _sliced(build: TermBuilder, term: Term) -> Term:
    source = build.terms[term.inputs[0]]
    if source.op != "slice" or source["axis"] != term["axis"]:
        return term
    begin, end = source["begin"] + term["begin"], source["begin"] + term["end"]
    return Term("slice", source.inputs, freeze(axis=term["axis"], begin=begin, end=end), term.shape)
