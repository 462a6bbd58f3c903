"""Reader of TASO's JSON format of substitutions (Jia et al., SOSP 2019).

What the file leaves open is read so that the source is well-formed in as many ways as it can be: every rank (those of
convolutions and of ``numdim`` are given), and groups of a convolution as many as the input's channels hold the
filter's. A split divides where the concat that it undoes joined, followed through relu, products and convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlc.operators import OPERATORS, Requirements, ShapeError, infer
from mlc.operators.index import Condition, Poly, as_poly, divides, equal
from mlc.substitution.assume import multiple, solvable
from mlc.substitution.codec import RuleError
from mlc.substitution.compose import with_sizes
from mlc.substitution.graph import Graph, Node, Ref
from mlc.substitution.quotients import divided
from mlc.substitution.rule import Rule

__all__ = ["RANKS", "read_taso"]

#: ranks that are tried for rules that name none
RANKS = (1, 2, 3, 4, 5)
_PLAIN = {each.taso: each for each in OPERATORS.values() if each.taso}


def read_taso(data: Mapping[str, Any]) -> list[Rule]:
    """The rule at every rank at which its source is well-formed; raises :class:`RuleError` with the reason."""
    name = f"taso-{data.get('id', '?')}"
    found, reason = [], "it has no rank"
    try:
        if not data["src"] or not data["dst"] or not data["outputs"]:
            raise ValueError("a rule must have operators and outputs on both sides")
        numbers = {node["attr"]["numdim"] for side in ("src", "dst") for node in data[side] if "numdim" in node["attr"]}
        convolves = any(node["op"] == "conv2d" for node in data["src"])
        for rank in sorted(numbers) or ((4,) if convolves else RANKS):
            try:
                found.append(_Reader(name, data, int(rank)).rule())
            except ShapeError as error:
                reason = str(error)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RuleError(f"rule {name}: it must be in TASO's format: {type(error).__name__}: {error}") from error
    if not found:
        raise RuleError(f"rule {name}: its source must be well-formed at some rank: {reason}")
    return found


@dataclass
class _Built:
    """A side with the shape of every value, and where along its axes a value was joined."""

    nodes: list[Node]
    outputs: dict[str, Ref]
    demands: list[Condition]


class _Reader:
    def __init__(self, name: str, data: Mapping[str, Any], rank: int) -> None:
        self.name, self.data, self.rank = name, data, rank
        inputs = dict.fromkeys(r for side in ("src", "dst") for n in data[side] for r in n["in"] if r.startswith("?"))
        letters = {4: "nchw", 3: "bij", 2: "ij"}.get(rank, "abcde")
        self.shapes = {f"x{r[1:]}": tuple(Poly.symbol(f"{letters[a]}{r[1:]}") for a in range(rank)) for r in inputs}

    def rule(self) -> Rule:
        """Solves what the source demands of the inputs' sizes by substitution."""
        for attempt in range(60):
            source = self._build("src")
            change = self._solve(source.demands, attempt)
            if change is None:
                break
            self.shapes = {n: tuple(s.substitute(change) for s in shape) for n, shape in self.shapes.items()}
        else:
            raise ShapeError("its source's sizes cannot be solved")
        target = self._build("dst")
        pairs = self.data["outputs"]
        rule = Rule(f"{self.name}" if "numdim" in str(self.data) or "conv2d" in str(self.data)
                    else f"{self.name}/rank{self.rank}", self.shapes,
                    Graph(tuple(source.nodes), tuple(source.outputs[a] for a, _ in pairs)),
                    Graph(tuple(target.nodes), tuple(target.outputs[b] for _, b in pairs)),
                    tuple(d for d in source.demands if d.poly.constant is None and d.relation == "=="))
        return with_sizes(rule, {})

    def _solve(self, demands: Sequence[Condition], attempt: int) -> dict[str, Poly] | None:
        for demand in demands:
            if demand.poly.constant is not None:
                if not demand.evaluate({}):
                    raise ShapeError(f"{demand} never holds")
                continue
            whole = multiple(demand.poly)
            if whole is not None:
                # input channels are groups of filter channels, output channels groups of outputs
                letter = {"c": "g", "n": "o"}.get(whole[0][0], "k")
                known = {s for shape in self.shapes.values() for size in shape for s in size.symbols}
                name = f"{letter}{whole[0].lstrip('nchwgo')}"
                return {whole[0]: whole[1] * Poly.symbol(name if name not in known else f"{name}_{attempt}")}
            found = solvable(demand.poly) if demand.relation == "==" else None
            if found is not None and not any(c < 0 for _, c in found[1].terms):
                return {found[0]: found[1]}
        return None

    def _build(self, side: str) -> _Built:
        built = _Built([], {}, [])
        shapes: dict[Ref, tuple[Poly, ...]] = {name: shape for name, shape in self.shapes.items()}
        joints: dict[Ref, dict[int, Poly]] = {}

        def add(op: str, inputs: Sequence[Ref], attributes: dict[str, Any], joint: dict[int, Poly]) -> Ref:
            require = Requirements()
            (shape,) = infer(op, [shapes[r] for r in inputs], attributes, require)
            built.demands += [condition for condition, _ in require.conditions]
            built.nodes.append(Node(op, tuple(inputs), attributes))
            ref = (len(built.nodes) - 1, 0)
            shapes[ref], joints[ref] = shape, joint
            return ref

        for place, node in enumerate(self.data[side]):
            inputs = [built.outputs[r] if r in built.outputs else f"x{r[1:]}" for r in node["in"]]
            op, attr = node["op"], node["attr"]
            known = [joints.get(r, {}) for r in inputs]
            if op == "split":
                if attr["num_outputs"] != 2:
                    raise ShapeError("a split must have two parts")
                axis = int(attr["axis"])
                if axis not in known[0]:
                    raise ShapeError(f"a split on axis {axis} must undo a concat")
                end = shapes[inputs[0]][axis]
                parts = ((as_poly(0), known[0][axis]), (known[0][axis], end))
                for k, (low, high) in enumerate(parts):
                    built.outputs[f"{place}.{k}"] = add("slice", inputs, {"axis": axis, "begin": low, "end": high}, {})
                continue
            if op == "concat":
                axis = int(attr["axis"])
                if attr["num_inputs"] != 2 or attr["numdim"] != self.rank:
                    raise ShapeError(f"a concat must have two inputs of rank {attr['numdim']}")
                ref = add("concat", inputs, {"axis": axis}, {axis: shapes[inputs[0]][axis]})
            elif op == "conv2d":
                ref = self._convolution(add, built, shapes, inputs, attr, known)
            elif op in _PLAIN:
                if _PLAIN[op].pointwise and _PLAIN[op].arity == 2:  # no broadcasting: literal ones would
                    built.demands += [equal(a, b) for a, b in zip(*(shapes[r] for r in inputs), strict=True)]
                joint = {k: v for one in reversed(known) for k, v in one.items()}
                if op == "matmul":
                    row, column = self.rank - 2, self.rank - 1
                    joint = {a: k[a] for a, k in ((row, known[0]), (column, known[1])) if a in k}
                ref = add(_PLAIN[op].name, inputs, {}, joint)
            else:
                raise RuleError(f"rule {self.name}: the operator {op!r} must be one of TASO's conv2d, concat, split, "
                                f"{', '.join(_PLAIN)}")
            if attr.get("acti", "none") == "relu":
                ref = add("relu", [ref], {}, joints[ref])
            elif attr.get("acti", "none") != "none":
                raise RuleError(f"rule {self.name}: a fused activation is none or relu, but got {attr['acti']!r}")
            built.outputs[f"{place}.0"] = ref
        return built

    def _convolution(self, add: Any, built: _Built, shapes: Mapping[Ref, tuple[Poly, ...]], inputs: Sequence[Ref],
                     attr: Mapping[str, Any], known: Sequence[Mapping[int, Poly]]) -> Ref:
        x, w = (shapes[r] for r in inputs)
        if attr["pad"] not in ("same", "valid"):
            raise ShapeError(f"a padding is same or valid, but got {attr['pad']!r}")
        built.demands += [equal(w[2], attr["kernel_h"]), equal(w[3], attr["kernel_w"]), divides(w[1], x[1])]
        groups, rest = divided(x[1], w[1])
        joint = {0: known[0][0]} if 0 in known[0] else {}
        if 0 in known[1]:
            joint[1] = known[1][0]
        attributes = {"stride": (int(attr["stride_h"]), int(attr["stride_w"])), "padding": attr["pad"],
                      "groups": groups if not rest.terms else x[1] // w[1]}
        ref: Ref = add("conv2d", inputs, attributes, joint)
        return ref
