"""Models to terms, saturated, extracted and written again: the same values, within limits, by proved rules only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tvm
from relax_evaluation import assert_same_values, evaluate, module, operators, weight
from substitution_rules import RULES, rule
from tvm import relax
from tvm.relax import op

from mlc.graph.pipeline import optimise, prepare
from mlc.graph.substitute.check import difference, identical
from mlc.graph.substitute.choose import Decision, Substitutions, digest, find
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.read import read
from mlc.graph.substitute.rules import rank_for, ready, shipped_patterns
from mlc.graph.substitute.saturate import saturate
from mlc.graph.substitute.search import Found, Options, search
from mlc.graph.substitute.split import joined, split
from mlc.graph.substitute.write import write
from mlc.graph.tasks import extract_tasks
from mlc.log.decision import GraphDecision
from mlc.substitution.egraph import Limits
from mlc.substitution.prove import Proved, prove
from mlc.substitution.rewrite import relevant
from mlc.substitution.rule import Rule
from mlc.substitution.terms import Term, TermBuilder, TermGraph
from mlc.target import resolve

CPU = resolve("x86-64-v3", threads=2)
PATTERNS = [Pattern(each) for each in RULES]
QUICK = Options()


def network(inputs: dict[str, tuple[int, ...]], body: Callable[..., relax.Expr]) -> tvm.IRModule:
    """main with the inputs and what ``body(emit, *inputs)`` makes of them."""
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in inputs.items()]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(body(builder.emit, *params))
        builder.emit_func_output(result)
    return builder.finalize()


def attention(rows: int = 16, width: int = 32, heads: int = 4) -> tvm.IRModule:
    """Three products of one input, with biases, and what a transformer makes of them."""

    def body(emit: Callable[..., relax.Expr], x: relax.Var) -> relax.Expr:
        parts = []
        for order in ([1, 0, 2], [1, 2, 0], [1, 0, 2]):
            y = emit(op.add(emit(op.matmul(x, weight(width, width))), weight(width)))
            parts.append(emit(op.permute_dims(emit(op.reshape(y, (rows, heads, width // heads))), order)))
        q, k, v = parts
        scores = emit(op.nn.softmax(emit(op.matmul(q, k)), axis=-1))
        out = emit(op.reshape(emit(op.permute_dims(emit(op.matmul(scores, v)), [1, 0, 2])), (rows, width)))
        return emit(op.nn.relu(emit(op.add(emit(op.matmul(out, weight(width, width))), x))))

    return network({"x": (rows, width)}, body)


def inception(channels: int = 32) -> tvm.IRModule:
    """Branches of one image with 1x1 convolutions in front, joined."""

    def body(emit: Callable[..., relax.Expr], x: relax.Var) -> relax.Expr:
        def conv(data: relax.Expr, filters: int, size: int = 1) -> relax.Expr:
            kernel = weight(filters, int(data.ty.shape[1]), size, size, low=-0.3, high=0.3)
            y = emit(op.nn.conv2d(data, kernel, padding=[size // 2] * 4))
            return emit(op.nn.relu(emit(op.add(y, weight(1, filters, 1, 1)))))

        pooled = emit(op.nn.max_pool2d(x, [3, 3], [1, 1], [1, 1, 1, 1]))
        parts = [conv(x, 16), conv(conv(x, 16), 32, 3), conv(conv(x, 16), 16, 5), conv(pooled, 16)]
        return emit(op.concat(parts, axis=1))

    return network({"x": (1, channels, 8, 8)}, body)


def grouped() -> tvm.IRModule:
    """A convolution in groups and one of each channel by itself, between 1x1 convolutions."""

    def body(emit: Callable[..., relax.Expr], x: relax.Var) -> relax.Expr:
        y = emit(op.nn.conv2d(x, weight(32, 4, 3, 3), padding=[1, 1, 1, 1], groups=4))
        z = emit(op.nn.conv2d(y, weight(32, 1, 3, 3), padding=[0, 0, 1, 1], strides=[2, 2], groups=32))
        return emit(op.nn.avg_pool2d(emit(op.nn.relu(z)), [2, 2], [2, 2], count_include_pad=True))

    return network({"x": (1, 16, 12, 12)}, body)


def recurrent(steps: int = 2, width: int = 16) -> tvm.IRModule:
    """A cell with four gates, unrolled; the weights of all steps are the same."""
    u, w, b = ([weight(width, width) for _ in range(4)], [weight(width, width) for _ in range(4)],
               [weight(width) for _ in range(4)])

    def body(emit: Callable[..., relax.Expr], x: relax.Var, h: relax.Expr, c: relax.Expr) -> relax.Expr:
        for step in range(steps):
            now = emit(op.strided_slice(x, [0], [step], [step + 1]))
            sums = [
                emit(op.add(emit(op.add(emit(op.matmul(now, u[i])), emit(op.matmul(h, w[i])))), b[i]))
                for i in range(4)
            ]
            i, f, o = (emit(op.sigmoid(each)) for each in sums[:3])
            c = emit(op.add(emit(op.multiply(f, c)), emit(op.multiply(i, emit(op.tanh(sums[3]))))))
            h = emit(op.multiply(o, emit(op.tanh(c))))
        return h

    return network({"x": (steps, width), "h": (1, width), "c": (1, width)}, body)


def unsupported() -> tvm.IRModule:
    """Operators that the table lacks, tuples among them, between products of one input."""

    def body(emit: Callable[..., relax.Expr], x: relax.Var) -> relax.Expr:
        a, b = emit(op.matmul(x, weight(24, 16))), emit(op.matmul(x, weight(24, 16)))
        tops = emit(op.topk(a, k=16, axis=1, ret_type="both", largest=True))
        order = emit(op.astype(emit(relax.TupleGetItem(tops, 1)), "float32"))
        rolled = emit(op.nn.leakyrelu(b, 0.1))
        return emit(relax.Tuple([emit(op.add(emit(relax.TupleGetItem(tops, 0)), rolled)), order, x]))

    return network({"x": (4, 24)}, body)


NETWORKS: dict[str, Callable[[], tvm.IRModule]] = {
    **{f.__name__: f for f in (attention, inception, grouped, unsupported)},
    "recurrent": lambda: recurrent(steps=1),  # of more steps the integer program takes ten seconds
}


def prepared(mod: tvm.IRModule) -> tvm.IRModule:
    with CPU.tvm:
        for step in prepare(CPU):
            mod = step(mod)
    return mod


def searched(mod: tvm.IRModule, **options: int) -> Found:
    return search(prepared(mod), PATTERNS, CPU.tvm, Options(**options))


@cache
def found_of(name: str) -> Found:
    """What a whole search finds for a network."""
    return searched(NETWORKS[name]())


@pytest.mark.parametrize("hand", RULES, ids=lambda each: each.name)
def test_the_rules_of_these_tests_are_proved(hand: Rule) -> None:
    assert isinstance(prove(hand), Proved)


@pytest.mark.parametrize("name", NETWORKS)
def test_terms_are_the_model_again(name: str) -> None:
    mod = prepared(NETWORKS[name]())
    reading = read(mod["main"])
    assert_same_values(mod, write(mod, reading, reading.graph))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("largest", [300, 6])
def test_every_candidate_computes_the_same(name: str, largest: int) -> None:
    mod = NETWORKS[name]()
    found = searched(mod, largest=largest)
    assert found.candidates[0].graph == found.reading.graph.live()
    for candidate in found.candidates[1:]:
        assert candidate.rules
        assert_same_values(mod, found.module(candidate), 1e-4)
        assert difference(candidate.graph, found.candidates[0].graph) < 1e-9
        assert name == "inception" or identical(candidate.graph, found.candidates[0].graph)


@pytest.mark.parametrize(("name", "products"), [("inception", 5), ("recurrent", 4)])
def test_products_are_merged(name: str, products: int) -> None:
    found = found_of(name)

    def count(graph_module: tvm.IRModule) -> int:
        return sum(o in ("matmul", "nn.conv2d") for o in operators(graph_module))

    assert min(count(found.module(c)) for c in found.candidates[1:]) <= products < count(found.mod)
    assert min(c.estimate for c in found.candidates) < found.candidates[0].estimate


def test_shipped_rules_join_the_products_of_gates_and_steps() -> None:
    """At most one product a step for the inputs and one for the state, of the eight that there are; and one more."""
    mod = prepared(recurrent(steps=3, width=32))
    found = search(mod, shipped_patterns(), CPU.tvm, Options())
    best = min(found.candidates[1:], key=lambda c: c.estimate)
    products = [sum(term.op == "matmul" for term in c.graph.terms) for c in (best, found.candidates[0])]
    assert products[0] <= 7
    assert products[1] == 24
    assert identical(best.graph, found.candidates[0].graph)


def test_rules_of_other_ranks_and_operators_are_left_out() -> None:
    graph = read(prepared(recurrent())["main"]).graph
    kept = relevant(shipped_patterns(), graph.operators())
    assert 0 < len(kept) < len(shipped_patterns()) / 2
    assert not any(node.op in ("conv2d", "max_pool2d") for each in kept for node in each.source)


@pytest.mark.parametrize("operators", [
    {("matmul", 2), ("add", 2), ("mul", 2), ("sigmoid", 2)}, {("conv2d", 4), ("relu", 4), ("add", 4), ("mean", 4)},
    {("matmul", 3), ("softmax", 3), ("transpose", 3), ("layer_norm", 3)}, {("reshape", 2), ("concat", 3)}, set(),
], ids=lambda operators: "+".join(sorted(name for name, _ in operators)) or "none")
def test_rules_that_are_not_made_ready_would_not_apply(operators: set[tuple[str, int]]) -> None:
    """Told by the operators of rules as they are stated, before they are written out for ranks."""
    library = shipped_patterns(4)
    chosen = ready(library, {op for op, _ in operators})
    assert len(chosen) < len(library) and {type(each) for each in chosen} <= {Pattern}
    wanted, found = (relevant(each, operators) for each in (tuple(library), chosen))
    assert [each.rule.name for each in found] == [each.rule.name for each in wanted]
    assert all(one is other for one, other in zip(found, wanted, strict=True)), "each is made once"


def test_the_checks_see_a_wrong_graph() -> None:
    build = TermBuilder()
    x, w = build.add("input", (), (4, 6), id=0), build.add("constant", (), (6, 6), id=0)
    right = build.graph([build.add("matmul", (x, w), (4, 6))])
    wrong = build.graph([build.add("matmul", (x, build.add("transpose", (w,), (6, 6), perm=(1, 0))), (4, 6))])
    assert difference(wrong, right) > 1e-3
    assert not identical(wrong, right)
    assert difference(right, right) == 0.0
    assert identical(right, right)


def test_a_rule_without_a_certificate_is_refused() -> None:
    bare = rule("bare", "x[n,m]", "relu(x)", "x", proved=False)
    with pytest.raises(ValueError, match="the rule bare has no certificate"):
        Pattern(bare)


def test_preconditions_are_checked() -> None:
    square = Pattern(rule("square", "x[n,n]", "transpose(transpose(x, perm=(1,0)), perm=(1,0))", "x"))
    wide = Pattern(rule("wide", "x[n,m]", "transpose(transpose(x, perm=(1,0)), perm=(1,0))", "x",
                        conditions=("n >= m+1",)))
    for shape, expected in (((4, 4), {"square": 1}), ((6, 4), {"wide": 1}), ((4, 6), {})):
        build = TermBuilder()
        x = build.add("input", (), shape, id=0)
        turned = build.add("transpose", (x,), shape[::-1], perm=(1, 0))
        graph = build.graph([build.add("transpose", (turned,), shape, perm=(1, 0))])
        assert saturate(graph, [square, wide])[1].matches == expected


def test_a_size_must_follow_from_the_match() -> None:
    """The two slices must be the two halves of what they cut, whatever their sizes."""
    merge = Pattern(next(r for r in RULES if r.name == "relu-of-slice-2"))
    for cuts, fires in ((((0, 3), (3, 8)), True), (((0, 3), (4, 8)), False), (((0, 3), (3, 7)), False)):
        build = TermBuilder()
        x = build.add("input", (), (2, 8), id=0)
        parts = [build.add("slice", (x,), (2, e - b), axis=1, begin=b, end=e) for b, e in cuts]
        graph = build.graph([build.add("relu", (part,), build.shape(part)) for part in parts])
        assert bool(saturate(graph, [merge])[1].matches) == fires


def test_limits_hold() -> None:
    mod = prepared(recurrent(steps=8))
    graph = read(mod["main"]).graph
    _, report = saturate(graph, PATTERNS, Limits(nodes=700))
    assert report.reason == "nodes"
    assert report.nodes < 720
    _, report = saturate(graph, PATTERNS, Limits(rounds=1))
    assert report.rounds == 1
    _, report = saturate(graph, PATTERNS, Limits(work=50_000))
    assert report.reason == "work"
    assert 50_000 <= report.work < 100_000  # it is looked at after each rule
    _, report = saturate(graph, PATTERNS, Limits(seconds=0.0))
    assert report.reason == "seconds"


class _Clock:
    """Runs ``times`` as fast as it should: what takes a second takes so many on a machine that much slower."""

    def __init__(self, times: float) -> None:
        self._times, self._began = times, time.monotonic()

    def monotonic(self) -> float:
        return self._began + self._times * (time.monotonic() - self._began)


def on_a_machine_slower(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("choose", "extract", "saturate", "search"):
        monkeypatch.setattr(f"mlc.graph.substitute.{name}.time", _Clock(times))


@pytest.mark.parametrize("work", [Options().work, 100_000.0, 20_000.0])
@pytest.mark.parametrize("name", ["inception", "recurrent"])
def test_a_machine_a_hundred_times_slower_finds_the_same(
    name: str, work: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is work for all that is searched or not."""
    mod = prepared(recurrent(steps=2, width=32) if name == "recurrent" else NETWORKS[name]())
    found = []
    for times in (1.0, 100.0):
        on_a_machine_slower(times, monkeypatch)
        found.append(search(mod, shipped_patterns(), CPU.tvm, Options(work=work)))
    quick, slow = found
    assert slow.seconds > 10 * quick.seconds
    assert [(c.graph, c.rules) for c in quick.candidates] == [(c.graph, c.rules) for c in slow.candidates]
    assert [replace(r, seconds=0.0) for r in quick.reports] == [replace(r, seconds=0.0) for r in slow.reports]
    assert not slow.late


def test_less_work_finds_less() -> None:
    mod = prepared(recurrent())
    gains = []
    for work in (Options().work, 20_000.0, 0.0):
        found = search(mod, shipped_patterns(), CPU.tvm, Options(work=work))
        assert (found.reports[0].reason == "work") == (work < Options().work)
        gains.append(found.candidates[0].estimate - min(c.estimate for c in found.candidates))
    assert gains[0] > gains[1] >= gains[2] == 0.0


def test_a_search_that_is_stopped_by_the_clock_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = prepared(recurrent())
    on_a_machine_slower(1e6, monkeypatch)
    rules = Substitutions(shipped_patterns())
    with pytest.warns(UserWarning, match="must take less than 1800 s, but this one was stopped after"):
        assert find(mod, CPU, rules).late


def test_products_that_need_each_other_are_not_joined() -> None:
    build = TermBuilder()
    x, w = build.add("input", (), (4, 4), id=0), build.add("constant", (), (4, 4), id=0)
    first = build.add("matmul", (x, w), (4, 4))
    graph = build.graph([build.add("matmul", (first, w), (4, 4))])
    rows = Pattern(next(r for r in RULES if r.name == "merge-rows"))
    assert not saturate(graph, [rows])[1].matches


def test_many_products_of_one_tensor_saturate() -> None:
    build = TermBuilder()
    x = build.add("input", (), (4, 8), id=0)
    ends = [build.add("matmul", (x, build.add("constant", (), (8, 8), id=i)), (4, 8)) for i in range(24)]
    _, report = saturate(build.graph(ends), PATTERNS, Limits(rounds=40))
    assert report.reason == "saturated"
    assert report.matches["merge-columns"] == 23


def _from_outputs(graph: TermGraph) -> TermGraph:
    """The graph with its terms in the order in which the outputs need them."""
    build = TermBuilder()

    @cache
    def at(place: int) -> int:
        term = graph.terms[place]
        return build.put(Term(term.op, tuple(map(at, term.inputs)), term.attributes, term.shape))

    return build.graph([at(place) for place in graph.outputs])


@pytest.mark.parametrize("largest", [1, 5, 40])
def test_regions_fit_together_again(largest: int) -> None:
    graph = read(prepared(recurrent())["main"]).graph.live()
    regions = split(graph, largest)
    assert max(sum(not t.leaf or t.op == "opaque" for t in r.graph.terms) for r in regions) <= largest
    again = joined(graph, regions, [r.graph for r in regions])
    assert digest(_from_outputs(again)) == digest(_from_outputs(graph))


def test_equal_layers_are_equal_regions() -> None:
    def body(emit: Callable[..., relax.Expr], x: relax.Var) -> relax.Expr:
        for _ in range(4):
            x = emit(op.nn.relu(emit(op.matmul(x, weight(8, 8)))))
        return x

    graph = read(network({"x": (2, 8)}, body)["main"]).graph
    assert len({region.graph for region in split(graph, 2)}) == 1


def test_pipeline_takes_what_is_faster_and_switched_off_nothing() -> None:
    mod, decisions = recurrent(steps=1, width=32), list[Decision]()
    plain = optimise(mod, CPU)
    taken = optimise(mod, CPU, substitutions=Substitutions(PATTERNS, QUICK, notify=decisions.append))
    (decision,) = decisions
    assert decision.reason == "prices"
    assert decision.chosen > 0
    calls = [sum(t.weight for t in extract_tasks(each, CPU)) for each in (plain, taken)]
    assert calls[1] < calls[0]
    x = [np.random.default_rng(seed).standard_normal((1, 32)).astype("float32") for seed in range(3)]
    np.testing.assert_allclose(evaluate(taken, *x)[0], evaluate(plain, *x)[0], atol=1e-5)


@pytest.mark.slow
def test_what_was_decided_is_taken() -> None:
    mod, decisions = recurrent(steps=2, width=32), list[Decision]()
    optimise(mod, CPU, substitutions=Substitutions(PATTERNS, QUICK, notify=decisions.append))
    for candidate in decisions[0].found.candidates:
        own = digest(candidate.graph)
        optimise(mod, CPU, substitutions=Substitutions(
            PATTERNS, QUICK, decided=lambda subject, own=own: GraphDecision(subject, own),  # type: ignore[misc]
            notify=decisions.append))
        assert decisions[-1].reason == "decided"
        assert decisions[-1].found.candidates[decisions[-1].chosen].graph == candidate.graph


def test_slices_in_one_piece_are_views() -> None:
    def body(emit: Callable[..., relax.Expr], x: relax.Var) -> relax.Expr:
        y = emit(op.matmul(x, weight(64, 96)))
        cuts = [emit(op.strided_slice(y, [1], [b], [e])) for b, e in ((0, 32), (32, 64), (65, 96))]
        return emit(relax.Tuple([emit(op.matmul(each, weight(int(each.ty.shape[1]), 8))) for each in cuts]))

    from mlc.artifact import compile_module

    mod = network({"x": (1, 64)}, body)
    lowered = optimise(mod, CPU)
    assert operators(lowered).count("strided_slice") == 2  # the third starts where no vector can
    data = np.random.default_rng(1).standard_normal((1, 64)).astype("float32")
    for ours, theirs in zip(compile_module(lowered, resolve("native"))(data), evaluate(module(mod["main"]), data),
                            strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank, wanted", [(2, 4), (4, 4), (5, 5), (7, 5)])
def test_rules_are_made_ready_for_the_ranks_that_a_model_has(rank: int, wanted: int) -> None:
    mod = network({"x": (2, 3)}, lambda emit, x: emit(op.reshape(
        emit(op.nn.relu(emit(op.reshape(x, (1,) * (rank - 2) + (2, 3))))), (6,))))
    assert rank_for(mod["main"]) == wanted
