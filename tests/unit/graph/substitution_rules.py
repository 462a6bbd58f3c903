"""A few rules that the tests of the search apply, written by hand; the first test proves them."""

from __future__ import annotations

import re
from typing import Any

from mlc.substitution.codec import load_rule
from mlc.substitution.prove import certified
from mlc.substitution.rule import Rule

__all__ = ["RULES", "rule"]


def rule(
    name: str, inputs: str, source: str, target: str, *, conditions: tuple[str, ...] = (), proved: bool = True
) -> Rule:
    """A rule from texts: ``x[m,k] w[k,n]`` for the inputs, ``matmul(x, w) ; relu(x)`` for a side.

    Attributes stand behind the operands: ``slice(y, axis=1, begin=0, end=n)``. Equal terms are one node.
    """
    shapes = {n: [s for s in sizes.split(",") if s] for n, sizes in re.findall(r"(\w+)\[([^]]*)\]", inputs)}
    data: dict[str, Any] = {
        "name": name, "inputs": shapes, "source": _graph(source), "target": _graph(target),
        "conditions": list(conditions),
    }
    return certified(load_rule(data)) if proved else load_rule(data)


def _graph(text: str) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []

    def put(node: dict[str, Any]) -> str:
        if node not in nodes:
            nodes.append(node)
        return f"%{nodes.index(node)}"

    def parse(part: str) -> str:
        part = part.strip()
        found = re.fullmatch(r"(\w+)\((.*)\)", part)
        if found is None:
            return part
        operands, attributes = [], {}
        for argument in _split(found[2], ","):
            key, sign, value = argument.partition("=")
            if sign and re.fullmatch(r"\s*\w+\s*", key):
                attributes[key.strip()] = _value(value.strip())
            else:
                operands.append(parse(argument))
        return put({"op": found[1], "inputs": operands, "attributes": attributes})

    outputs = [parse(part) for part in _split(text, ";")]
    return {"nodes": nodes, "outputs": outputs}


def _value(text: str) -> Any:
    if text.startswith("("):
        return [_value(part.strip()) for part in _split(text[1:-1], ",") if part.strip()]
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _split(text: str, sign: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == sign and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


#: a convolution whose windows all lie inside, and one that keeps the size
_CONVS = ("stride=(s,t), padding=(0,0,0,0)", "padding=same")

RULES: tuple[Rule, ...] = (
    rule("merge-columns", "x[m,k] u[k,a] v[k,b]", "matmul(x, u); matmul(x, v)",
         "slice(matmul(x, concat(u, v, axis=1)), axis=1, begin=0, end=a);"
         "slice(matmul(x, concat(u, v, axis=1)), axis=1, begin=a, end=a+b)"),
    *(rule(f"merge-filters-{place}", "x[n,c,h,w] u[a,c,r,q] v[b,c,r,q]", f"conv2d(x, u, {how}); conv2d(x, v, {how})",
           f"slice(conv2d(x, concat(u, v, axis=0), {how}), axis=1, begin=0, end=a);"
           f"slice(conv2d(x, concat(u, v, axis=0), {how}), axis=1, begin=a, end=a+b)")
      for place, how in enumerate(_CONVS)),
    rule("sum-of-convolutions", "x[n,c,h,w] y[n,d,h,w] u[o,c,r,q] v[o,d,r,q]",
         "add(conv2d(x, u, padding=same), conv2d(y, v, padding=same))",
         "conv2d(concat(x, y, axis=1), concat(u, v, axis=1), padding=same)"),
    rule("merge-rows", "x[a,k] y[b,k] w[k,n]", "matmul(x, w); matmul(y, w)",
         "slice(matmul(concat(x, y, axis=0), w), axis=0, begin=0, end=a);"
         "slice(matmul(concat(x, y, axis=0), w), axis=0, begin=a, end=a+b)"),
    rule("sum-of-products", "x[m,a] y[m,b] u[a,n] v[b,n]", "add(matmul(x, u), matmul(y, v))",
         "matmul(concat(x, y, axis=1), concat(u, v, axis=0))"),
    *(rule(f"merge-{name}-1", f"y[m,{'a+b'}] u[m,a] v[m,b]",
           f"{name}(slice(y, axis=1, begin=0, end=a), u); {name}(slice(y, axis=1, begin=a, end=a+b), v)",
           f"slice({name}(y, concat(u, v, axis=1)), axis=1, begin=0, end=a);"
           f"slice({name}(y, concat(u, v, axis=1)), axis=1, begin=a, end=a+b)") for name in ("add", "mul")),
    rule("merge-bias-2", "y[m,a+b] u[1,a] v[1,b]",
         "add(slice(y, axis=1, begin=0, end=a), u); add(slice(y, axis=1, begin=a, end=a+b), v)",
         "slice(add(y, concat(u, v, axis=1)), axis=1, begin=0, end=a);"
         "slice(add(y, concat(u, v, axis=1)), axis=1, begin=a, end=a+b)"),
    rule("merge-bias-4", "y[n,a+b,h,w] u[1,a,1,1] v[1,b,1,1]",
         "add(slice(y, axis=1, begin=0, end=a), u); add(slice(y, axis=1, begin=a, end=a+b), v)",
         "slice(add(y, concat(u, v, axis=1)), axis=1, begin=0, end=a);"
         "slice(add(y, concat(u, v, axis=1)), axis=1, begin=a, end=a+b)"),
    *(rule(f"{name}-of-slice-{rank}", f"x[{sizes}]",
           f"{name}(slice(x, axis=1, begin=0, end=a)); {name}(slice(x, axis=1, begin=a, end=a+b))",
           f"slice({name}(x), axis=1, begin=0, end=a); slice({name}(x), axis=1, begin=a, end=a+b)")
      for name in ("relu", "tanh", "sigmoid") for rank, sizes in ((2, "m,a+b"), (4, "n,a+b,h,w"))),
)
