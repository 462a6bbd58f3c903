"""Rules for many ranks: which blocks of axes are admitted, what they are at a rank, what a certificate may claim."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from mlc.operators.evaluate import evaluate
from mlc.operators.index import Condition, Poly
from mlc.substitution.check import CertificateError, check, check_rule, ranks
from mlc.substitution.check.ranks import check_blocks, expanded
from mlc.substitution.codec import RuleError, dump_rule, graph_text, load_rule, rule_text
from mlc.substitution.graph import Graph
from mlc.substitution.merge_ranks import general_rules, said
from mlc.substitution.prove import Proved, prove
from mlc.substitution.ranks import RANK, instances
from mlc.substitution.shipped import shipped_rules
from tests.unit.graph.substitution_rules import rule
from tests.unit.substitution.smt import judgement
from tests.unit.substitution.test_second_judge import at_ranks
from tests.unit.substitution.test_second_judge import instances as random_instances

GENERAL = [one for one in shipped_rules() if one.blocks]


def general(inputs, source, target=None, **blocks):
    """A rule that is not proved, with blocks; its target is the source where none is given."""
    return replace(rule("law", inputs, source, target or source, proved=False), blocks=blocks)


SOUND = {
    "functions": general("x[n]", "relu(tanh(x))", n={}),
    "sums": general("x[n] y[n]", "add(x, y)", n={}),
    "a number": general("x[n] s[]", "mul(x, s)", n={}),
    "a scale": general("x[n,c,h] s[1,c,1]", "mul(x, s)", n={"s": 0}, c={}, h={"s": 2}),
    "concat between": general("x[n,a,h] y[n,b,h]", "concat(x, y, axis=1)", n={}, h={}),
    "concat from behind": general("x[n,a,h] y[n,b,h]", "concat(x, y, axis=-2)", n={}, h={}),
    "slice": general("x[n,8,h]", "slice(x, axis=1, begin=2, end=5)", n={}, h={}),
    "transpose": general("x[n,c,h]", "transpose(x, perm=(2,0,1))", n={}, h={}),
    "rows": general("x[n,c,h]", "softmax(x, axis=1)", n={}, h={}),
    "norm": general("x[n,m,c] s[c]", "rms_norm(x, s)", n={}, m={}),
    "norm with a bias": general("x[n,m,c] s[c] t[c]", "layer_norm(x, s, t)", n={}, m={}),
    "sum of one axis": general("x[n,c,h]", "sum(x, axes=(1,))", n={}, h={}),
    "sum of a block": general("x[n,c,h]", "mean(x, axes=(2,))", n={}, h={}),
    "largest of a block": general("x[n,c,h]", "max(x, axes=(-3,), keepdims=1)", n={}, h={}),
    "beside what was reduced": general("x[n,c]", "sub(x, max(x, axes=(0,), keepdims=1))", n={}, c={}),
    "batches": general("a[b,m,k] c[b,k,l]", "matmul(a, c)", b={}),
    "reshape behind": general("x[n,6,h]", "reshape(x, shape=(n,2,3,h))", n={}, h={}),
    "reshape of all": general("x[n,h]", "reshape(x, shape=(n*h,))", n={}, h={}),
    "repeated": general("x[1,c] y[n,c]", "add(y, expand(x, shape=(n,c)))", n={"x": 0}, c={}),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_done_to_a_block_is_what_is_done_to_one_axis(name):
    """At several ranks, evaluated: the axes of a block taken as one, before or after, give the same elements."""
    one, rng = SOUND[name], np.random.default_rng(0)
    check_blocks(one)
    tried = 0
    for lengths in ((1, 1, 1), (2, 2, 2), (3, 1, 2), (0, 2, 1), (1, 0, 3)):
        axes = {block: [f"{block}_{k}" for k in range(length)]
                for block, length in zip(sorted(one.blocks), lengths, strict=False)}
        whole = name.startswith(("sum of a b", "largest", "beside")) and 0 in lengths
        if whole:
            continue
        found = expanded(one, axes)
        sizes = {size: int(rng.integers(2, 4)) for size in found.symbols} | dict.fromkeys("c", 3)
        flat = sizes | {block: int(np.prod([sizes[a] for a in each])) for block, each in axes.items()}
        given = {n: rng.normal(size=[int(s.evaluate(sizes)) for s in shape]) for n, shape in found.shapes.items()}
        flattened = {n: given[n].reshape([int(s.evaluate(flat)) for s in shape]) for n, shape in one.shapes.items()}
        ours, theirs = value(found.source, given, sizes), value(one.source, flattened, flat)
        np.testing.assert_allclose(ours.ravel(), theirs.ravel())
        tried += 1
    assert tried >= 2


def test_reshapes_between_blocks_are_of_any_two_shapes():
    """A block that a reshape alone names: proved of one axis each, and right of two and three."""
    law = general("x[n] y[n]", "reshape(add(x, y), shape=(m,))", "add(reshape(x, shape=(m,)), reshape(y, shape=(m,)))",
                  n={}, m={})
    law = replace(law, conditions=(Condition(Poly.symbol("n") - Poly.symbol("m"), "=="),))
    proof = prove(law)
    assert isinstance(proof, Proved)
    law = replace(law, certificate=proof.certificate)
    found = next(one for one in instances([law]) if one.name.endswith(":3,2"))
    check_rule(found)
    assert [len(shape) for shape in found.shapes.values()] == [2, 2]
    sizes = {"m_0": 2, "m_1": 3, "m_2": 2, "n_0": 4, "n_1": 3}
    x, y = np.arange(12.0).reshape(4, 3), np.arange(12.0, 24.0).reshape(4, 3)
    ours, theirs = (value(side, {"x": x, "y": y}, sizes) for side in (found.source, found.target))
    np.testing.assert_array_equal(ours, (x + y).reshape(2, 3, 2))
    np.testing.assert_array_equal(ours, theirs)
    other = replace(found, conditions=())
    with pytest.raises(CertificateError, match="something else"):
        check_rule(other)


def test_products_have_any_number_of_batch_axes():
    """Certified by the rule of one batch axis; at none and at three the prover finds a proof of its own."""
    law = general("a[b,m,k] c[b,k,l] d[b,l,n]", "matmul(matmul(a, c), d)", "matmul(a, matmul(c, d))", b={})
    proof = prove(law)
    assert isinstance(proof, Proved)
    found = instances([replace(law, certificate=proof.certificate)])
    assert [len(one.shapes["a"]) for one in found] == [2, 3, 4, RANK]
    for one in found:
        check_rule(one)
        assert isinstance(prove(replace(one, certificate=None)), Proved)
        assert not list(random_instances(one, 4, 2))


def value(graph: Graph, inputs, sizes):
    """What a graph of one output gives."""
    def put(attribute):
        if isinstance(attribute, tuple):
            return tuple(map(put, attribute))
        return int(attribute.evaluate(sizes)) if isinstance(attribute, Poly) else attribute

    known = dict(inputs)
    for place, node in enumerate(graph.nodes):
        attributes = {key: put(each) for key, each in node.attributes.items()}
        [known[place, 0]] = evaluate(node.op, [known[ref] for ref in node.inputs], attributes)
    return known[graph.outputs[0]]


UNSOUND = {
    "concat along a block": general("x[n] y[n]", "concat(x, y, axis=0)", n={}),
    "slice of a block": general("x[n]", "slice(x, axis=0, begin=0, end=1)", n={}),
    "softmax of a block": general("x[m,n]", "softmax(x, axis=-1)", n={}),
    "padding of a block": general("x[n]", "pad(x, before=(1,), after=(0,))", n={}),
    "norm of a block": general("x[m,n] s[n]", "rms_norm(x, s)", n={}),
    "parameters of a block": general("x[m,n] s[n] t[n]", "layer_norm(x, s, t)", n={}),
    "norm of channels": general("x[n,c] s[c] t[c] u[c] v[c]", "batch_norm(x, s, t, u, v)", n={}),
    "a row for several axes": general("x[n,c] s[1,c]", "add(x, s)", n={}),
    "ones of another block": general("x[n,c] s[1,1]", "add(x, s)", n={"s": 1}, c={"s": 0}),
    "ones that are not": general("x[n,c] s[n,c]", "add(x, s)", n={"s": 0}),
    "ones of a tensor that is not": general("x[n]", "relu(x)", n={"s": 0}),
    "columns of a product": general("a[m,k] b[k,n]", "matmul(a, b)", n={}),
    "inner axes of a product": general("a[m,k] b[k,n]", "matmul(a, b)", k={}),
    "batches of images": general("x[n,c,8,8] w[o,c,3,3]", "conv2d(x, w)", n={}),
    "windows": general("x[n,c,8,8]", "max_pool2d(x, kernel=(2,2))", n={}),
    "an axis as long as a block": general("x[n] y[m]", "add(x, y)", n={}),
    "a sum's result in a block's place": general("x[n,c] y[n]", "add(sum(x, axes=(0,)), y)", n={}),
    "an output that lost its axes": general("x[n] y[m]", "add(x, x) ; relu(y)",
                                            "add(x, x) ; reshape(relu(y), shape=(n))", n={}),
    "outputs in another order": general("x[n,n,c]", "relu(x)", "relu(transpose(x, perm=(0,2,1)))", n={}),
    "a size that nothing has": general("x[n]", "relu(x)", n={}, m={}),
    "a part of a size": general("x[n*c]", "relu(x)", n={}),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_blocks_that_an_operator_does_not_take_are_refused(name):
    with pytest.raises((CertificateError, ValueError)):
        check_blocks(UNSOUND[name])
    assert not isinstance(prove(UNSOUND[name], refute=False), Proved)
    with pytest.warns(UserWarning, match="left out"):
        assert not instances([UNSOUND[name]])


def test_axes_are_counted_behind_blocks():
    one = general("x[n,a,h] y[n,b,h]", "sum(transpose(concat(x, y, axis=-2), perm=(1,2,0)), axes=(-1,))", n={}, h={})
    found = expanded(one, {"n": ["p", "q"], "h": ["r", "s", "t"]})
    assert graph_text(found.source) == ("sum(transpose(concat(x, y, axis=2), perm=(2, 3, 4, 5, 0, 1)), "
                                        "axes=(4, 5))")
    assert [str(size) for size in found.shapes["x"]] == ["p", "q", "a", "r", "s", "t"]
    for axes in ({"n": ["a"], "h": []}, {"n": ["p"], "h": ["p"]}, {"n": ["$0"], "h": []}, {"n": ["p"]}):
        with pytest.raises(CertificateError):
            expanded(one, axes)


def test_the_same_rule_at_several_ranks_becomes_one():
    """The axis of a concatenation may be any, with blocks on both sides; a function of a matrix is one of anything."""
    rows, planes, lines = (rule(name, inputs, f"concat(relu(x), relu(y), axis={axis})",
                                f"relu(concat(x, y, axis={axis}))") for name, inputs, axis in
                           (("a/1", "x[d0,c] y[d1,c]", 0), ("b/1", "x[n,d0,h] y[n,d1,h]", 1),
                            ("c/1", "x[d0] y[d1]", 0)))
    twice = rule("d/1", "x[n,c]", "relu(relu(x))", "relu(x)")
    kept = rule("e/1", "x[n,n]", "transpose(transpose(x, perm=(1,0)), perm=(1,0))", "x")
    one, other, last = general_rules([rows, planes, lines, twice, kept])
    assert [rule_text(each).splitlines()[1].strip() for each in (one, other, last)] == [
        "x: [n..., d0, h...], y: [n..., d1, h...]", "x: [n...]", "x: [n..., n...]"]
    for each in (one, other, last):
        check_rule(each)
    found = instances([one, other])
    assert len({said(each) for each in found}) == len(found)
    assert max(len(shape) for each in found for shape in each.shapes.values()) == RANK


def test_rules_are_written_with_their_blocks():
    one = GENERAL[0]
    again = load_rule(json.loads(json.dumps(dump_rule(one))))
    assert again == one and again.blocks == one.blocks
    check(dump_rule(one))
    for blocks in ([], {"n": 0}, {"n": {"x": True}}, {"n": {"x": "0"}}):
        with pytest.raises(RuleError, match="blocks"):
            load_rule({**dump_rule(one), "blocks": blocks})


@pytest.fixture(scope="module")
def forged():
    """A rule of one rank with the certificate of the general one, as text to be changed."""
    one = next(each for each in GENERAL if len(each.blocks) == 2 and "concat" in graph_text(each.source))
    found = next(each for each in instances([one]) if each.name.endswith(":1,2"))
    check_rule(found)
    return json.loads(json.dumps(dump_rule(found)))


def test_a_rule_that_is_not_the_general_one_is_refused(forged):
    def changed(change):
        data = copy.deepcopy(forged)
        change(data)
        return data

    def at(data, *path):
        for key in path:
            data = data[key]
        return data

    proof, general_one = ("certificate",), ("certificate", "general")
    axes = next(iter(forged["certificate"]["axes"]))
    changes = [
        lambda d: [n["attributes"].update(axis=0) for n in at(d, "source")["nodes"] + at(d, "target")["nodes"]
                   if n["op"] == "concat"],
        lambda d: at(d, *proof)["axes"][axes].append("fresh"),
        lambda d: at(d, *proof).update(axes={}),
        lambda d: at(d, *general_one).pop("blocks"),
        lambda d: at(d, *general_one).pop("certificate"),
        lambda d: at(d, *general_one).update(certificate=at(d, *proof)),
        lambda d: at(d, *general_one, "certificate", "outputs", 0, "steps").clear(),
        lambda d: at(d, *general_one).update(blocks={**at(d, *general_one)["blocks"], "d0": {}}),
        lambda d: at(d, *proof)["whole"]["forward"].append("a"),
        lambda d: at(d, *proof).update(backward=None),
        lambda d: d.update(blocks={axes: {}}),
        lambda d: d.update(conditions=["n0 >= 2"] if "n0" in str(d["inputs"]) else ["h0 >= 2"]),
    ]
    check(forged)
    for number, change in enumerate(changes):
        with pytest.raises(Exception, match="rule"):
            check(changed(change))
            pytest.fail(f"change {number} was accepted")


def test_instances_have_the_certificate_of_their_own_rule():
    """Not that of an equal rule, of a user's file say, which was there before."""
    right = GENERAL[0]
    wrong = replace(right, certificate={**right.certificate, "outputs": []})
    for each in (wrong, right):
        assert {one.certificate["general"]["certificate"] == each.certificate for one in instances([each])} == {True}


def test_what_is_remembered_of_rules_may_go_at_any_time(monkeypatch, forged):
    class Forgetful(dict):
        """As when another thread has cleared it."""

        def __setitem__(self, key, value):
            pass

    monkeypatch.setattr(ranks, "_known", Forgetful())
    check(forged)


def test_other_judges_agree_at_low_and_high_ranks():
    """The prover finds a proof of the rule at that rank itself, Z3 and evaluation find nothing against it."""
    chosen = at_ranks(GENERAL[::40])
    assert {max(map(len, one.shapes.values())) for one in chosen} >= {1, RANK}
    for one in chosen:
        check_rule(one)
        assert isinstance(prove(replace(one, certificate=None)), Proved), one.name
        assert not judgement(one, assignments=1).against, one.name
        assert not list(random_instances(one, 6, 3)), one.name
