"""What a compile applies was checked in it, fits the proof at the sizes at hand, and is compared with the model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from substitution_rules import rule
from test_substitution_search import CPU, PATTERNS, QUICK, network, recurrent, searched
from tvm import relax
from tvm.relax import op

from mlc.graph.pipeline import optimise
from mlc.graph.substitute import search as search_room
from mlc.graph.substitute.check import same_where_changed
from mlc.graph.substitute.choose import Decision, Substitutions
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.read import read
from mlc.graph.substitute.rules import patterns
from mlc.graph.substitute.write import write
from mlc.substitution import trust
from mlc.substitution.check.certificate import _Check
from mlc.substitution.codec import dump_rule
from mlc.substitution.egraph import EGraph
from mlc.substitution.prove import certified
from mlc.substitution.ranks import instances
from mlc.substitution.rewrite import Rewrite
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import FORMAT, read_rules, shipped_rules
from mlc.substitution.terms import Term, TermBuilder, TermGraph

TWICE = ("x[n,m]", "relu(relu(x))", "relu(x)")


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(trust, "_verdicts", {})
    trust._remembered.cache_clear()


def built(rewrite: Rewrite, graph: TermGraph) -> list[bool]:
    """What came of every match of a rewrite."""
    egraph, _ = EGraph.of(graph)
    return [rewrite.build(egraph, match) for match in list(rewrite.matches(egraph))]


def twice(size: int = 4) -> TermGraph:
    build = TermBuilder()
    once = build.add("relu", (build.add("input", (), (size, size), id=0),), (size, size))
    return build.graph([build.add("relu", (once,), (size, size))])


@pytest.mark.parametrize("certificate", [{}, {"format": 1}, {"by": "hand"}, [], "yes"])
def test_rule_without_a_valid_certificate_is_not_applied(certificate: object) -> None:
    bare = replace(rule("twice", *TWICE, proved=False), certificate=certificate)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="a rule must have a valid certificate to be applied, but rule twice"):
        assert built(Rewrite(bare), twice()) == [False]


def test_wrong_rule_with_the_certificate_of_a_right_one_is_not_applied() -> None:
    right = rule("twice", *TWICE)
    wrong = replace(rule("wrong", "x[n,m]", "relu(relu(x))", "neg(x)", proved=False), certificate=right.certificate)
    assert built(Rewrite(right), twice()) == [True]
    with pytest.warns(UserWarning, match="hash differs"):
        assert built(Rewrite(wrong), twice()) == [False]


def test_rule_that_says_what_is_known_is_not_asked_for_its_certificate() -> None:
    """Of the same graph another rule that says the same tells it nothing; one that says something else does."""
    right = rule("twice", *TWICE)
    again, other = (replace(rule(name, "x[n,m]", "relu(relu(x))", target, proved=False), certificate=right.certificate)
                    for name, target in (("again", "relu(x)"), ("other", "neg(x)")))
    egraph, _ = EGraph.of(twice())
    egraph.unproved = {}
    [match] = Rewrite(right).matches(egraph)
    assert Rewrite(right).build(egraph, match) and egraph.unproved == {id(right): right}
    egraph.rebuild()
    egraph.unproved.clear()
    size = len(egraph)
    assert not any(Rewrite(again).build(egraph, each) for each in list(Rewrite(again).matches(egraph)))
    assert not egraph.unproved and len(egraph) == size
    assert Rewrite(other).build(egraph, match) and egraph.unproved == {id(other): other}


def test_certificate_is_checked_once_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr("mlc.substitution.check.check_proof", lambda one: checked.append(one.name))
    one = rule("twice", *TWICE)
    for _ in range(3):
        trust._verdicts.clear()  # another process
        trust._remembered.cache_clear()
        assert trust.trusted(one)
    assert checked == ["twice"]
    assert trust.trusted(certified(replace(rule("other", "x[n]", "relu(relu(x))", "relu(x)"), certificate=None)))
    assert len(checked) == 2


def test_demands_of_the_source_hold_where_it_is_found() -> None:
    """In ``sum(x + y) - sum(y)`` one of them must not broadcast."""
    sums = Rewrite(rule("sums", "x[n] y[m]", "sub(sum(add(x, y), axes=(0,)), sum(y, axes=(0,)))", "sum(x, axes=(0,))"))
    for n, m, fires in ((5, 5, True), (1, 5, False), (5, 1, False), (1, 1, True)):
        build = TermBuilder()
        x, y = build.add("input", (), (n,), id=0), build.add("input", (), (m,), id=1)
        one = build.add("sum", (build.add("add", (x, y), (max(n, m),)),), (), axes=(0,), keepdims=0)
        other = build.add("sum", (y,), (), axes=(0,), keepdims=0)
        assert any(built(sums, build.graph([build.add("sub", (one, other), ())]))) == fires


@pytest.mark.parametrize("partial", [True, False])
def test_reading_more_needs_a_tensor_that_is_defined(partial: bool) -> None:
    """A convolution of some channels as one of all, with zeros in its filter."""
    one = certified(rule("cut", "x[n,c,h,w] u[o,d,1,1]", "conv2d(slice(x, axis=1, begin=0, end=d), u)",
                         "conv2d(x, pad(u, before=(0,0,0,0), after=(0,c-d,0,0)))", conditions=("c >= d",),
                         proved=False))
    assert one.certificate is not None and one.certificate["whole"]["forward"] == ["x"]
    build = TermBuilder()
    x = build.add("input", (), (1, 6, 2, 2), id=0)
    data = build.add("reciprocal" if partial else "relu", (x,), (1, 6, 2, 2))
    cut = build.add("slice", (data,), (1, 4, 2, 2), axis=1, begin=0, end=4)
    w = build.add("constant", (), (3, 4, 1, 1), id=0)
    given = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}
    graph = build.graph([build.add("conv2d", (cut, w), (1, 3, 2, 2), **given)])
    found = built(Rewrite(one), graph)
    assert found and any(found) != partial


def pair(change: bool) -> tuple[TermGraph, TermGraph]:
    """``relu(x @ w) @ v`` and the same, or not, by a longer way."""
    build = TermBuilder()
    x, w = build.add("input", (), (4, 6), id=0), build.add("constant", (), (6, 6), id=0)
    first = build.add("relu", (build.add("matmul", (x, w), (4, 6)),), (4, 6))
    own = build.graph([build.add("matmul", (first, w), (4, 6))])
    turned = build.add("transpose", (first,), (6, 4), perm=(1, 0))
    other = build.add("transpose", (w,), (6, 6), perm=(1, 0))
    product = build.add("matmul", (w if change else other, turned), (6, 4))
    return own, build.graph([build.add("transpose", (product,), (4, 6), perm=(1, 0))])


def test_graph_that_was_taken_is_compared_with_the_models_own() -> None:
    assert same_where_changed(*pair(change=False)) is True
    assert same_where_changed(*pair(change=True)) is False


def test_rounding_alone_is_no_difference() -> None:
    """``x + 10^6 - 10^6`` is far from ``x`` in float32, so that float64 decides."""
    build = TermBuilder()
    x, large = build.add("input", (), (3, 3), id=0), build.add("scalar", (), (), value=10**6)
    there = build.add("add", (x, large), (3, 3))
    back, doubled = build.add("sub", (there, large), (3, 3)), build.add("add", (x, x), (3, 3))
    assert same_where_changed(build.graph([x]), build.graph([back])) is True
    assert same_where_changed(build.graph([doubled]), build.graph([back])) is False


def test_element_that_is_defined_no_more_is_seen() -> None:
    build = TermBuilder()
    x = build.add("input", (), (3, 3), id=0)
    own = build.graph([build.add("relu", (x,), (3, 3))])
    one = build.add("reciprocal", (x,), (3, 3))
    zero = build.add("sub", (one, one), (3, 3))
    assert same_where_changed(own, build.graph([build.add("add", (own.outputs[0], zero), (3, 3))])) is False


def test_what_is_too_large_to_compare_is_not_judged() -> None:
    build = TermBuilder()
    x, w = build.add("input", (), (2**14, 2**13), id=0), build.add("constant", (), (2**13, 2**14), id=0)
    one = build.add("matmul", (x, w), (2**14, 2**14))
    other = build.add("matmul", (build.add("relu", (x,), (2**14, 2**13)), w), (2**14, 2**14))
    assert same_where_changed(build.graph([one]), build.graph([other])) is None


def test_constants_are_not_folded_into_infinities() -> None:
    """``x * (c * c)`` is 0 or infinite where ``x * c * c`` is neither, or at least not always."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 2), "float32"))
    c = relax.const(np.full((2, 2), 1e30, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(op.multiply(builder.emit(op.multiply(x, c)), c)))
        builder.emit_func_output(result)
    mod = builder.finalize()
    reading = read(mod["main"])
    leaf = {term.op: place for place, term in enumerate(reading.graph.terms) if term.leaf}
    terms = [*reading.graph.terms, Term("mul", (leaf["constant"],) * 2, (), (2, 2))]
    terms.append(Term("mul", (leaf["input"], len(terms) - 1), (), (2, 2)))
    text = write(mod, reading, TermGraph(tuple(terms), (len(terms) - 1,))).script()
    assert text.count("R.multiply(") == 2


def test_constant_that_is_not_finite_is_not_whole() -> None:
    for value, known in ((1.0, True), (-np.inf, False)):
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((2, 2), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                result = builder.emit_output(op.add(x, relax.const(np.full((2, 2), value, "float32"))))
            builder.emit_func_output(result)
        graph = read(builder.finalize()["main"]).graph
        assert (graph.outputs[0] in graph.whole_places()) == known


@pytest.mark.parametrize("part", [(), ("whole", "backward"), ("whole", "backward", "format", "rule", "assume")])
def test_a_file_of_rules_without_valid_certificates_changes_no_compile(tmp_path: Path, part: tuple[str, ...]) -> None:
    """A user's file, as it would be read for a compile. Rules whose certificates say what they claim are applied before
    it is known that they show nothing of it."""
    data = [dump_rule(replace(each.proved, certificate={key: (each.proved.certificate or {})[key] for key in part}))
            for each in PATTERNS]
    (tmp_path / "mine.json").write_text(json.dumps({"format": FORMAT, "rules": data}, default=dict))
    mine, decisions = patterns(read_rules(tmp_path / "mine.json")), list[Decision]()
    assert len(mine) >= len(data)
    with pytest.warns(UserWarning, match="a rule must have a valid certificate to be applied"):
        optimise(recurrent(steps=1, width=32), CPU, substitutions=Substitutions(mine, QUICK, notify=decisions.append))
    assert decisions[0].chosen == 0 and len(decisions[0].found.candidates) == 1
    optimise(recurrent(steps=1, width=32), CPU, substitutions=Substitutions(PATTERNS, QUICK, notify=decisions.append))
    assert decisions[1].chosen, "with certificates they change it"


def test_nothing_is_checked_where_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("mlc.graph.substitute.search.trusted", lambda one: not asked.append(one.name))  # type: ignore
    plain = network({"x": (4, 4)}, lambda emit, x: emit(op.nn.relu(x)))
    for mod in (recurrent(steps=1, width=32), plain):
        asked.clear()
        found = searched(mod)
        matched = {name.removesuffix(" turned") for each in found.reports for name in each.matches}
        assert set(asked) == (matched if len(found.candidates) > 1 else set())
    assert not asked


def test_rule_for_many_ranks_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []
    run = _Check.run
    monkeypatch.setattr(_Check, "run", lambda self, proof: (proved.append(self.rule.name), run(self, proof)))
    general = next(each for each in shipped_rules() if len(each.blocks) == 1)
    made = instances([general])
    assert len(made) > 2 and all(map(trust.trusted, made)) and proved == [general.name]
    one = made[0]
    trust._verdicts.clear()
    with pytest.warns(UserWarning, match="the general rule says something else at these ranks"):
        assert not trust.trusted(replace(one, certificate=made[1].certificate))
    assert one.certificate is not None
    other = {**one.certificate["general"], "certificate": {**(general.certificate or {}), "outputs": []}}
    with pytest.warns(UserWarning, match="differ in their number of outputs"):
        assert not trust.trusted(replace(one, certificate={**one.certificate, "general": other}))
    other["certificate"] = {**(general.certificate or {}), "general": one.certificate["general"]}
    with pytest.warns(UserWarning, match="it must be of a proved rule with blocks"):
        assert not trust.trusted(replace(one, certificate={**one.certificate, "general": other}))


def test_a_search_is_made_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rules are wrong, each of which might be met only where the others are left out."""
    right, met = rule("twice", *TWICE), list[int]()
    unproved = [rule(f"wrong{n}", "x[n,m]", "relu(relu(x))", "neg(x)", proved=False) for n in range(3)]
    wrong = [replace(each, certificate=right.certificate) for each in unproved]

    def searched(_mod: object, patterns: Sequence[Pattern], *_: object) -> tuple[Any, list[Rule]]:
        met.append(len(patterns))
        return None, [patterns[0].proved]

    monkeypatch.setattr(search_room, "_searched", searched)
    found: Any = None
    with pytest.warns(UserWarning, match="hash differs"):
        search_room.search(found, [Pattern(each) for each in (*wrong, right)], CPU.tvm, reading=cast(Any, object()))
    assert met == [4, 1]


def test_verdicts_are_remembered_of_what_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, whole = set[str](), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: (seen.add(self.name), whole(self))[1])
    trust._checker.__wrapped__()
    assert {"certificate.py", "ranks.py", "codec.py", "trust.py", "laws.py"} <= seen


def test_graph_that_is_wrong_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a certificate of a wrong rule accepted: which product is which."""
    right = rule("merge", "x[m,k] u[k,n] v[k,n]", "matmul(x, u) ; matmul(x, v)",
                 "slice(matmul(x, concat(u, v, axis=1)), axis=1, begin=0, end=n) ; "
                 "slice(matmul(x, concat(u, v, axis=1)), axis=1, begin=n, end=n+n)")
    swapped = replace(right, target=replace(right.target, outputs=right.target.outputs[::-1]))
    monkeypatch.setattr("mlc.graph.substitute.search.trusted", lambda _rule: True)
    decisions: list[Decision] = []
    for each in (right, swapped):
        monkeypatch.setattr("mlc.graph.substitute.choose._PROMISING", 10.0)  # whatever it costs
        monkeypatch.setattr("mlc.graph.substitute.choose.clearly_faster", lambda _comparison: True)
        rules = Substitutions([Pattern(each)], QUICK, notify=decisions.append)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimise(recurrent(steps=1, width=32), CPU, substitutions=rules)
        wrong = [str(w.message) for w in said if "computes something else than the model's own" in str(w.message)]
        assert bool(wrong) == (each is swapped)
    assert [bool(decision.chosen) for decision in decisions] == [True], "nothing is decided for the wrong one"
