"""From two graphs of equal value in one world of sizes to a rule at its most general sizes, or to a near miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from mlc.operators import operators_where
from mlc.operators.index import Poly, as_poly
from mlc.substitution.applicable import determined
from mlc.substitution.codec import graph_text, rule_text
from mlc.substitution.compose import compose, with_sizes
from mlc.substitution.enumerate import Term, term_graph
from mlc.substitution.family import Family
from mlc.substitution.fingerprint import agree, assignments
from mlc.substitution.graph import Graph, Node
from mlc.substitution.rule import Rule
from mlc.substitution.unify import generalise, merged_sizes, renamed

__all__ = ["NearMiss", "candidate", "canonical", "in_context", "joined", "oriented", "same_pair", "weight"]

#: at how many sizes sides are compared; what takes a condition is looked at more closely
CHECKS, CLOSE_CHECKS = 6, 40
#: operators that gain from being merged with others of their kind
_PRODUCTS = operators_where(lambda each: each.product)
_NAMES = "abcdefghij"


@dataclass(frozen=True)
class NearMiss:
    """Graphs that agree in a family's world only, and the sizes where they differ (none: no common sizes)."""

    source: str
    target: str
    shapes: Mapping[str, tuple[Poly, ...]]
    sizes: Mapping[str, int] | None


def weight(rule: Rule) -> tuple[int, int, int, str]:
    """Simple and general rules first: few operators, then many inputs and symbols, of which others are instances."""
    nodes = len(rule.source.nodes) + len(rule.target.nodes)
    return nodes, -len(rule.shapes), -len(rule.symbols), rule_text(rule)


def same_pair(family: Family, one: Term, other: Term) -> str:
    """A text that pairs share which differ in the names of inputs of one shape only."""
    names: dict[str, str] = {}
    kinds: dict[tuple[Poly, ...], int] = {}
    texts: dict[int, str] = {}

    def text(term: Term) -> str:
        if term.step is None:
            name = term.inputs[0]
            if name not in names:
                shape = family.inputs[name]
                kinds[shape] = kinds.get(shape, 0) + 1
                names[name] = f"{shape}{kinds[shape]}"
            return names[name]
        if term.number not in texts:
            texts[term.number] = f"{term.step.op}{hash(term.step)}({','.join(map(text, term.operands))})"
        return texts[term.number]

    return f"{text(other)}={text(one)}"


def candidate(family: Family, one: Term, other: Term) -> Rule | NearMiss | None:
    """The rule that ``other`` is ``one``; None where neither side could be told from the other."""
    for left, right in ((other, one), (one, other)):
        rule = oriented(family, term_graph(left), term_graph(right))
        if rule is not None:
            break
    else:
        return None
    general = generalise(merged_sizes(rule))
    if general is None:
        return NearMiss(graph_text(rule.source), graph_text(rule.target), rule.shapes, None)
    general = canonical(general)
    return _checked(general) if determined(general) else None


def _checked(rule: Rule) -> Rule | NearMiss:
    failed = _counterexample(rule)
    if failed is None:
        return rule
    for stronger in _stronger(rule):
        if _counterexample(stronger, 3) is None and _counterexample(stronger, CLOSE_CHECKS) is None:
            return stronger
    return NearMiss(graph_text(rule.source), graph_text(rule.target), rule.shapes, failed)


def _counterexample(rule: Rule, checks: int = CHECKS) -> Mapping[str, int] | None:
    """Sizes where the sides differ; sizes of one where the precondition admits none at all."""
    tried = False
    for sizes in assignments(rule, checks):
        tried = True
        if not agree(rule, sizes):
            return sizes
    return None if tried else dict.fromkeys(rule.symbols, 1)


def _stronger(rule: Rule) -> Iterator[Rule]:
    """The rule with two sizes of one kind made equal, then with one size made 1; weakest demands first."""
    for one, other in combinations(rule.symbols, 2):
        if one.rstrip("0123456789") == other.rstrip("0123456789"):
            yield from _narrowed(rule, {other: Poly.symbol(one)})
    for name in rule.symbols:
        yield from _narrowed(rule, {name: as_poly(1)})


def _narrowed(rule: Rule, values: Mapping[str, Poly]) -> Iterator[Rule]:
    found = generalise(with_sizes(rule, values))
    if found is not None:
        yield canonical(found)


def oriented(family: Family, source: Graph, target: Graph) -> Rule | None:
    """The rule with symbols of each input's own, if the source reads and tells all that the target does."""
    if not set(target.inputs) <= set(source.inputs) or not source.nodes:
        return None
    shapes = {name: tuple(_own(size, name) for size in family.inputs[name]) for name in source.inputs}
    rule = Rule(family.name, shapes, source, target)
    told = set(rule.symbols)
    asked = set(Rule("", {}, target, source).symbols)
    return rule if asked <= told else None


def _own(size: Poly, name: str) -> Poly:
    return size.substitute({s: Poly.symbol(f"{s}_{name}") for s in size.symbols if s[0].islower()})


def canonical(rule: Rule) -> Rule:
    """Inputs named a, b, c in the order of use, sizes by letter and number."""
    rule = renamed(rule)
    names = dict(zip(rule.shapes, _NAMES, strict=False))

    def graph(side: Graph) -> Graph:
        def of(ref: object) -> object:
            return names[ref] if isinstance(ref, str) else ref

        nodes = tuple(Node(n.op, tuple(map(of, n.inputs)), n.attributes) for n in side.nodes)  # type: ignore[arg-type]
        return Graph(nodes, tuple(map(of, side.outputs)))  # type: ignore[arg-type]

    shapes = {names[name]: shape for name, shape in rule.shapes.items()}
    return replace(rule, shapes=shapes, source=graph(rule.source), target=graph(rule.target))


def in_context(rule: Rule) -> Rule | None:
    """For a rule whose way back leaves sizes open (how much to enlarge a filter): the way back beside a product that
    tells them. ``conv'(x, enlarge(w)) = conv(x, w)`` gives the pair ``conv(x, w), conv'(x, v)`` whose first becomes
    ``conv'(x, enlarge(w))``.
    """
    if not rule.two_way or not rule.source.nodes or not rule.target.nodes:
        return None
    if determined(rule.turned):
        return None
    root = rule.source.nodes[-1]
    if root.op not in _PRODUCTS or rule.source.outputs != ((len(rule.source.nodes) - 1, 0),):
        return None
    inner = [place for place, ref in enumerate(root.inputs) if not isinstance(ref, str)]
    if len(inner) != 1:
        return None
    [shape] = [t.shape for t in compose(Graph(rule.source.nodes, (root.inputs[inner[0]],)), rule.shapes)[0]]
    # the other filter has outputs of its own
    shapes = {**rule.shapes, "context": (Poly.symbol("context_0"), *shape[1:])}
    beside = Node(root.op, tuple("context" if p == inner[0] else ref for p, ref in enumerate(root.inputs)),
                  root.attributes)

    def graph(side: Graph) -> Graph:
        return Graph((*side.nodes, beside), (*side.outputs, (len(side.nodes), 0)))

    general = generalise(Rule(rule.name, shapes, graph(rule.target), graph(rule.source)))
    if general is None or not determined(canonical(general)):
        return None
    found = _checked(canonical(general))
    return found if isinstance(found, Rule) else None


def joined(rule: Rule) -> Rule | None:
    """From ``concat(f, g) = h`` with products in f or g: both are slices of h, two outputs replaced at once."""
    for source, target in ((rule.source, rule.target), (rule.target, rule.source)):
        [root] = source.outputs
        if isinstance(root, str) or source.nodes[root[0]].op != "concat" or not target.nodes:
            continue
        node = source.nodes[root[0]]
        parts = node.inputs
        if any(isinstance(ref, str) for ref in parts) or parts[0] == parts[1]:
            continue
        nodes = source.nodes[:-1]
        if not any(node.op in _PRODUCTS for node in nodes):
            continue
        if root[0] != len(source.nodes) - 1 or set(Graph(nodes, parts).inputs) != set(target.inputs):
            continue
        axis = int(str(node.attributes["axis"]))
        shapes = [tensor.shape[axis] for tensor in compose(Graph(nodes, parts), rule.shapes)[0]]
        [whole] = target.outputs
        cuts = tuple(Node("slice", (whole,), {"axis": axis, "begin": begin, "end": end})
                     for begin, end in ((as_poly(0), shapes[0]), (shapes[0], shapes[0] + shapes[1])))
        made = Graph((*target.nodes, *cuts), ((len(target.nodes), 0), (len(target.nodes) + 1, 0)))
        two = Rule(rule.name, rule.shapes, Graph(nodes, parts), made)
        asked, told = set(Rule("", {}, made, made).symbols), set(two.symbols)
        general = generalise(two) if asked <= told else None
        if general is not None:
            found = _checked(canonical(general))
            return found if isinstance(found, Rule) else None
    return None
