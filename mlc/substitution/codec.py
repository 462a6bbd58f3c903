"""Rules as JSON that people can read: sizes and conditions are texts such as ``2*c+1`` and ``c1 == c2``.

One rule is ``{"name", "inputs": {"x": ["n", "c"]}, "source": {"nodes": [{"op", "inputs", "attributes"}], "outputs"},
"target", "conditions": [...], "certificate"}``; a ref is the name of an input or ``%2`` for the result of node 2. A
rule for many ranks has ``"blocks": {"n": {"s": 0}}`` besides: sizes that stand for any number of axes, and where inputs
have axes of length 1 in their place.
The parser of sizes knows integers, names, ``+ - * // %`` and parentheses, and evaluates nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mlc.errors import MlcError
from mlc.operators.index import Condition, Poly, as_poly
from mlc.substitution.graph import Graph, Node, Ref
from mlc.substitution.rule import Rule

__all__ = ["RuleError", "condition_text", "content_hash", "dump_rule", "graph_text", "load_rule", "parse_condition",
           "parse_fraction", "parse_size", "rule_text"]

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_$@][\w$@.]*)|(//|[-+*%()]))")
_WORDS = ("valid", "same")
_FRACTION = re.compile(r"-?\d{1,18}(/\d{1,18})?")
# What a rule may be at most. Proofs are of small graphs; a file that says more is not worth the wait.
_MOST_DIGITS, _MOST_LETTERS, _MOST_TERMS, _MOST_FACTORS, _MOST_NODES, _MOST_RANK = 18, 1000, 200, 16, 64, 16
_MOST_CALLS = 1000  # that a graph is written with as nested calls
_RELATION = re.compile(r"^(.*?)(==|>=|<=)(.*)$")


class RuleError(MlcError):
    """A rule cannot be read or does not mean anything: its name and the reason."""


def parse_size(text: str | int) -> Poly:
    """The polynomial that a text such as ``"(h+2)//2*c"`` stands for; raises ValueError."""
    if isinstance(text, int):
        return _bounded(as_poly(text))
    if not isinstance(text, str) or len(text) > _MOST_LETTERS:
        raise ValueError(f"a size is an integer or a text of at most {_MOST_LETTERS} letters, but got {_short(text)}")
    return _parsed(text)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Poly:
    tokens, place = [], 0
    text = text.rstrip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        if not found:
            raise ValueError(f"a size is made of integers, names, + - * // % and parentheses, but got {text!r}")
        tokens.append(found)
        place = found.end()
    value, rest = _sum(tokens, 0, text, 0)
    if rest < len(tokens):
        raise ValueError(f"a size must end after {value}, but got {text!r}")
    return value


def parse_fraction(text: Any) -> Fraction:
    """A number such as ``"-3/4"``; raises ValueError for other notations, whose values may be of any length."""
    if isinstance(text, str) and len(text) <= 2 * _MOST_DIGITS + 2:
        found = _fraction(text)
        if found is not None:
            return found
    if isinstance(text, int) and len(str(text)) <= _MOST_DIGITS:
        return Fraction(text)
    raise ValueError(f"a fraction is two integers of at most {_MOST_DIGITS} digits, but got {_short(text)}")


@lru_cache(maxsize=4096)
def _fraction(text: str) -> Fraction | None:
    return Fraction(text) if _FRACTION.fullmatch(text) else None


def _bounded(poly: Poly) -> Poly:
    """The polynomial, if it is of a size that is worth to reason about."""
    if len(poly.terms) > _MOST_TERMS or any(len(m) > _MOST_FACTORS or abs(c) >= 10**_MOST_DIGITS
                                            for m, c in poly.terms):
        raise ValueError(f"a size must have at most {_MOST_TERMS} terms of at most {_MOST_FACTORS} factors and "
                         f"{_MOST_DIGITS} digits")
    return poly


def _times(left: Poly, right: Poly) -> Poly:
    if len(left.terms) * len(right.terms) > 4 * _MOST_TERMS:
        raise ValueError(f"a size must have at most {_MOST_TERMS} terms when its products of sums are multiplied out")
    return left * right


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else type(value).__name__
    return repr(text[:40] + "…") if len(text) > 40 else repr(text)


def _sum(tokens: Sequence[re.Match[str]], at: int, text: str, depth: int) -> tuple[Poly, int]:
    if depth > 50:
        raise ValueError("a size must have fewer than 50 nested parentheses")
    value, at = _product(tokens, at, text, depth)
    while at < len(tokens) and tokens[at][3] in ("+", "-"):
        right, after = _product(tokens, at + 1, text, depth)
        value, at = _bounded(value + right if tokens[at][3] == "+" else value - right), after
    return value, at


def _product(tokens: Sequence[re.Match[str]], at: int, text: str, depth: int) -> tuple[Poly, int]:
    value, at = _factor(tokens, at, text, depth)
    while at < len(tokens) and tokens[at][3] in ("*", "//", "%"):
        right, after = _factor(tokens, at + 1, text, depth)
        sign, at = tokens[at][3], after
        if sign != "*" and right.constant is not None and right.constant < 1:
            raise ValueError(f"a divisor must be at least 1, but got {right} in {text!r}")
        value = _bounded(_times(value, right) if sign == "*" else value // right if sign == "//" else value % right)
    return value, at


def _factor(tokens: Sequence[re.Match[str]], at: int, text: str, depth: int) -> tuple[Poly, int]:
    if at >= len(tokens):
        raise ValueError(f"a size must not end with an operator, but got {text!r}")
    number, name, sign = tokens[at].groups()
    if number:
        return _bounded(as_poly(int(number))), at + 1
    if name:
        return Poly.symbol(name), at + 1
    if sign in ("-", "+"):
        value, after = _factor(tokens, at + 1, text, depth + 1)
        return (-value if sign == "-" else value), after
    if sign != "(":
        raise ValueError(f"a size must have a number or a name where {sign!r} stands, but got {text!r}")
    value, at = _sum(tokens, at + 1, text, depth + 1)
    if at >= len(tokens) or tokens[at][3] != ")":
        raise ValueError(f"a size must close its parentheses, but got {text!r}")
    return value, at + 1


def parse_condition(text: str) -> Condition:
    """``a == b``, ``a >= b`` or ``a <= b`` between sizes; raises ValueError."""
    if not isinstance(text, str) or len(text) > 2 * _MOST_LETTERS:
        raise ValueError(f"a condition is a text of at most {2 * _MOST_LETTERS} letters, but got {_short(text)}")
    found = _RELATION.match(text)
    if not found:
        raise ValueError(f"a condition is `a == b`, `a >= b` or `a <= b`, but got {text!r}")
    left, right = parse_size(found[1]), parse_size(found[3])
    if found[2] == "<=":
        left, right = right, left
    return Condition(left - right, "==" if found[2] == "==" else ">=")


def condition_text(condition: Condition) -> str:
    """The condition with positive terms left and negative ones right."""
    left = Poly({m: c for m, c in condition.poly.terms if c > 0})
    right = Poly({m: -c for m, c in condition.poly.terms if c < 0})
    if not left.terms and condition.relation == "==":
        left, right = right, left
    return f"{left} {condition.relation} {right}"


def _attribute(value: Any) -> Any:
    if isinstance(value, Poly):
        return str(value) if value.constant is None else value.constant
    if isinstance(value, Fraction):
        return {"fraction": str(value)}
    if isinstance(value, (tuple, list)):
        return [_attribute(v) for v in value]
    return value


def _read_attribute(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        if abs(value) >= 10**_MOST_DIGITS:
            raise ValueError(f"an integer must have at most {_MOST_DIGITS} digits")
        return value
    if isinstance(value, str):
        return value if value in _WORDS else parse_size(value)
    if isinstance(value, list):
        return tuple(map(_read_attribute, value))
    if isinstance(value, dict) and set(value) == {"fraction"}:
        return parse_fraction(value["fraction"])
    raise ValueError("an attribute is an integer, a size, a word or a list of these, but got "
                     f"{_short(value if isinstance(value, float) else str(value))}")


def _ref(ref: Ref) -> str:
    if isinstance(ref, str):
        return ref
    return f"%{ref[0]}" if ref[1] == 0 else f"%{ref[0]}.{ref[1]}"


def _read_ref(text: Any, nodes: int, inputs: Mapping[str, Any]) -> Ref:
    if not isinstance(text, str):
        raise ValueError(f"a ref is the name of an input or %NODE, but got {text!r}")
    found = re.fullmatch(r"%(\d+)(?:\.(\d+))?", text)
    if found:
        node, output = int(found[1]), int(found[2] or 0)
        if node >= nodes:
            raise ValueError(f"a ref must be to a node before, but {text} is read where {nodes} nodes are known")
        return node, output
    if text not in inputs:
        raise ValueError(f"the variable {text} is unbound: the rule's inputs are {', '.join(inputs) or 'none'}")
    return text


def _dump_graph(graph: Graph) -> dict[str, Any]:
    nodes = [{"op": node.op, "inputs": [_ref(r) for r in node.inputs],
              "attributes": {k: _attribute(v) for k, v in sorted(node.attributes.items())}} for node in graph.nodes]
    return {"nodes": nodes, "outputs": [_ref(r) for r in graph.outputs]}


def _load_graph(data: Mapping[str, Any], inputs: Mapping[str, Any]) -> Graph:
    nodes: list[Node] = []
    if len(data["nodes"]) > _MOST_NODES or len(data["outputs"]) > _MOST_NODES:
        raise ValueError(f"a side must have at most {_MOST_NODES} nodes and outputs")
    for node in data["nodes"]:
        attributes = {str(k): _read_attribute(v) for k, v in node.get("attributes", {}).items()}
        nodes.append(Node(str(node["op"]), tuple(_read_ref(r, len(nodes), inputs) for r in node["inputs"]), attributes))
    return Graph(tuple(nodes), tuple(_read_ref(r, len(nodes), inputs) for r in data["outputs"]))


def dump_rule(rule: Rule) -> dict[str, Any]:
    """The rule as what ``json.dumps`` takes."""
    data: dict[str, Any] = {
        "name": rule.name,
        "inputs": {name: [_attribute(size) for size in map(as_poly, shape)] for name, shape in rule.shapes.items()},
        "source": _dump_graph(rule.source),
        "target": _dump_graph(rule.target),
        "conditions": [condition_text(c) for c in rule.conditions],
    }
    if rule.blocks:
        data["blocks"] = {block: dict(places) for block, places in sorted(rule.blocks.items())}
    if rule.certificate is not None:
        data["certificate"] = rule.certificate
    return data


def load_rule(data: Any) -> Rule:
    """The rule that :func:`dump_rule` wrote; raises :class:`RuleError` with its name and the reason."""
    name = str(data.get("name", "without a name")) if isinstance(data, dict) else "without a name"
    try:
        if not isinstance(data, dict):
            raise ValueError(f"a rule is an object, but got {type(data).__name__}")
        given = data["inputs"]
        if not isinstance(given, dict) or not all(isinstance(shape, list | tuple) for shape in given.values()):
            raise ValueError(f"the inputs are an object with a list of sizes for each name, but got {given!r}")
        if len(given) > _MOST_NODES or any(len(shape) > _MOST_RANK for shape in given.values()):
            raise ValueError(f"a rule has at most {_MOST_NODES} inputs of at most {_MOST_RANK} dimensions")
        inputs = {str(k): tuple(map(parse_size, shape)) for k, shape in given.items()}
        odd = sorted({s for shape in inputs.values() for size in shape for s in size.symbols if s[0] in "$@"})
        if odd:
            raise ValueError(f"the names of sizes begin with letters, but got {', '.join(odd)}")
        conditions = tuple(map(parse_condition, data.get("conditions", [])))
        rule = Rule(name, inputs, _load_graph(data["source"], inputs), _load_graph(data["target"], inputs), conditions,
                    data.get("certificate"), _read_blocks(data.get("blocks", {})))
        known = {s for shape in inputs.values() for size in shape for s in size.symbols}
        # strides and paddings are sizes of the source that no shape tells
        known |= {s for node in rule.source.nodes for s in _symbols(tuple(node.attributes.values()))}
        for node in (*rule.source.nodes, *rule.target.nodes):
            unbound = sorted(_symbols(tuple(node.attributes.values())) - known)
            if unbound:
                raise ValueError(f"the size {unbound[0]} of {node.op} is unbound: no shape and no source "
                                 "attribute has it")
        for condition in conditions:
            unbound = sorted(condition.poly.symbols - known)
            if unbound:
                raise ValueError(f"the size {unbound[0]} of a condition is unbound: no shape and no source "
                                 "attribute has it")
    except KeyError as error:
        raise RuleError(f"rule {name}: it must have {error.args[0]!r}, which is missing") from error
    except (ValueError, ZeroDivisionError) as error:
        raise RuleError(f"rule {name}: {error}") from error
    except (TypeError, AttributeError) as error:
        raise RuleError(f"rule {name}: every part must be a list, an object or a text where rules have one, but "
                        f"{error}") from error
    except RecursionError:
        raise RuleError(f"rule {name}: its parts must not stand inside each other hundreds deep") from None
    return rule


def _read_blocks(data: Any) -> dict[str, dict[str, int]]:
    if not isinstance(data, dict) or not all(
            isinstance(places, dict) and all(type(place) is int for place in places.values())
            for places in data.values()):
        raise ValueError(f"the blocks are an object with the axes of ones by input for each size, but got {data!r:.80}")
    return {str(block): {str(name): int(place) for name, place in places.items()} for block, places in data.items()}


def _symbols(value: Any) -> set[str]:
    if isinstance(value, Poly):
        return set(value.symbols)
    return {s for v in value for s in _symbols(v)} if isinstance(value, tuple) else set()


def content_hash(rule: Rule) -> str:
    """SHA-256 of what the rule says, whatever its name and its certificate."""
    data = {k: v for k, v in dump_rule(rule).items() if k not in ("name", "certificate")}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def graph_text(graph: Graph) -> str:
    """The graph as nested calls: ``relu(matmul(x, w))``; several outputs are separated by semicolons.

    Where results are used so often that this would grow long, nodes are named: ``%0 = relu(x); add(%0, %0)``.
    """
    sizes: list[int] = []
    for node in graph.nodes:
        sizes.append(1 + sum(sizes[r[0]] for r in node.inputs if not isinstance(r, str)))
    nested = sum(sizes[r[0]] for r in graph.outputs if not isinstance(r, str)) <= _MOST_CALLS

    def attribute(value: Any) -> str:
        return f"({', '.join(map(attribute, value))})" if isinstance(value, tuple) else str(value)

    def of(ref: Ref) -> str:
        if isinstance(ref, str):
            return ref
        return call(graph.nodes[ref[0]]) if nested else _ref(ref)

    def call(node: Node) -> str:
        words = [of(r) for r in node.inputs] + [f"{k}={attribute(v)}" for k, v in node.attributes.items()]
        return f"{node.op}({', '.join(words)})"

    named = [] if nested else [f"%{place} = {call(node)}" for place, node in enumerate(graph.nodes)]
    return "; ".join([*named, *map(of, graph.outputs)])


def rule_text(rule: Rule) -> str:
    """Name, shapes, both sides and the precondition, for people; ``n...`` are the axes of a block, ``1...`` ones."""
    def axis(name: str, place: int, size: Poly) -> str:
        block = str(size) in rule.blocks or any(at.get(name) == place for at in rule.blocks.values())
        return f"{size}..." if block else str(size)

    shapes = ", ".join(f"{name}: [{', '.join(axis(name, *each) for each in enumerate(shape))}]"
                       for name, shape in rule.shapes.items())
    lines = [rule.name, f"  {shapes}", f"    {graph_text(rule.source)}", f" => {graph_text(rule.target)}"]
    if rule.conditions:
        lines.append(f"  where {' and '.join(map(condition_text, rule.conditions))}")
    return "\n".join(lines)
