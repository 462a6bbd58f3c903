"""Partially equivalent rules, completed by computing the region in which they differ as the source does (Wang et al.,
"PET: Optimizing Tensor Programs with Partially Equivalent Transformations and Automated Corrections", OSDI 2021).

Of a pair that agrees but for slabs at the ends of axes (:mod:`mlc.substitution.near`) comes a rule like any other: its
target is what the cheaper side has in between, joined with what the source makes of parts of its inputs at the ends. So
which elements differ is nothing that is believed: the rule is proved, or there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mlc.operators.index import Poly, as_poly
from mlc.substitution.applicable import determined
from mlc.substitution.candidates import canonical, oriented
from mlc.substitution.compose import compose
from mlc.substitution.enumerate import Counts, term_graph
from mlc.substitution.family import Family
from mlc.substitution.fingerprint import agree, assignments
from mlc.substitution.graph import Graph, Node, Ref
from mlc.substitution.near import Slabs, near_pairs, slabs
from mlc.substitution.regions import NoPart, Part, cut, part
from mlc.substitution.rule import Rule
from mlc.substitution.unify import generalise

__all__ = ["corrected", "corrected_rules"]

_CHECKS = 12


def corrected_rules(family: Family, counts: Counts) -> Iterator[tuple[Rule, Rule | None]]:
    """The near misses of a family at their most general sizes, each with the rule that its correction makes of it; None
    where none is found."""
    for more, less in near_pairs(family, counts):
        near = oriented(family, term_graph(more), term_graph(less))
        general = generalise(near) if near is not None else None
        if general is not None and determined(general):
            general = canonical(general)
            yield general, corrected(general)


def corrected(near: Rule) -> Rule | None:
    """The rule of a near miss, its conditions those under which both sides are well-formed; None where the sides do not
    agree but for slabs, or nothing is known of how to compute these alone. It agrees where it was evaluated."""
    found = slabs(near)
    if found is None:
        return None
    try:
        target = _target(near, found)
    except NoPart:
        return None
    rule = generalise(replace(near, target=target, conditions=()))
    if rule is None or not determined(rule):
        return None
    rule = canonical(rule)
    tried = [agree(rule, sizes) for sizes in assignments(rule, _CHECKS)]
    return rule if tried and all(tried) else None


def _target(near: Rule, found: Slabs) -> Graph:
    """Slabs from the first axis to the last, each as long on the axes before as what agrees there."""
    [output], _ = compose(near.source, near.shapes)
    sizes = [each for each in assignments(near, _CHECKS)
             if all((size - low - high).evaluate(each) >= 1
                    for size, low, high in zip(output.shape, found.before, found.behind, strict=True))]
    nodes: list[Node] = list(near.target.nodes)
    [whole] = near.target.outputs

    def inside(axis: int) -> tuple[Poly, Poly] | None:
        low, high = found.before[axis], found.behind[axis]
        return None if low == high == 0 else (low, output.shape[axis] - high)

    def below(axis: int, box: Part) -> Ref:
        """What is in the box of all axes before ``axis``."""
        if axis == output.rank:
            return cut(nodes, whole, box)
        ends, every = inside(axis), (None,) * (output.rank - axis - 1)
        made = below(axis + 1, (*box, ends))
        if ends is None:
            return made
        low, high = ends
        parts = [made]
        if low != 0:
            parts.insert(0, part(nodes, near.source, near.shapes, (*box, (as_poly(0), low), *every), sizes))
        if high != output.shape[axis]:
            parts.append(part(nodes, near.source, near.shapes, (*box, (high, output.shape[axis]), *every), sizes))
        while len(parts) > 1:
            nodes.append(Node("concat", tuple(parts[:2]), {"axis": axis}))
            parts[:2] = [(len(nodes) - 1, 0)]
        return parts[0]

    made = below(0, ())
    return Graph(tuple(nodes), (made,))
