"""Sequences and optionals inside of a model, against onnxruntime: nothing of them is left."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import mlc
from mlc.errors import ModelError


def _model(signature: str, body: str, opset: int = 18) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {signature} {body}')


BODIES = {
    "put together": """{
        a = Neg(x)
        s = SequenceConstruct(x, a)
        t = SequenceInsert(s, b, one)
        u = SequenceErase(t, zero)
        v = SequenceInsert(u, x)
        y = ConcatFromSequence<axis=1>(v) }""",
    "from an empty one": """{
        e = SequenceEmpty()
        s = SequenceInsert(e, x)
        t = SequenceInsert(s, b, zero)
        n = SequenceLength(t)
        f = Cast<to=1>(n)
        a = SequenceAt(t, minus)
        c = SequenceAt(t, zero)
        d = Sub(a, c)
        y = Mul(d, f) }""",
    "cut": """{
        s = SplitToSequence<axis=1>(x, two)
        a = SequenceAt(s, zero)
        c = SequenceAt(s, minus)
        r = Transpose(c)
        y = MatMul(a, r) }""",
    "cut to given parts": """{
        s = SplitToSequence<axis=1, keepdims=0>(x, parts)
        a = SequenceAt(s, one)
        c = SequenceAt(s, zero)
        y = Concat<axis=0>(a, a) }""",
    "each by itself": """{
        s = SplitToSequence<axis=1, keepdims=0>(x)
        a = SequenceAt(s, one)
        c = SequenceAt(s, minus)
        t = SequenceConstruct(a, c, a)
        y = ConcatFromSequence<axis=1, new_axis=1>(t) }""",
    "mapped": """{
        s = SplitToSequence<axis=1>(x, two)
        m = SequenceMap(s, x) <body = g2 (float[p, q] i, float[p, w] j) => (float[p, q] o) {
            h = ReduceMax<keepdims=1>(j, oneaxis)
            o = Add(i, h) }>
        y = ConcatFromSequence<axis=1>(m) }""",
    "optional": """{
        o = Optional(x)
        h = OptionalHasElement(o)
        e = OptionalGetElement(o)
        y = If (h) <then_branch = yes () => (float[p, w] i) { i = Neg(e) },
                    else_branch = no () => (float[p, w] j) { j = Abs(b) }> }""",
    "collected in a loop": """{
        e = SequenceEmpty()
        t = Loop (three, truth, e) <body = step (int64 i, bool c, seq(float[p, w]) s) => (bool d, seq(float[p, w]) r) {
            d = Identity(c)
            f = Cast<to=1>(i)
            m = Mul(x, f)
            r = SequenceInsert(s, m) }>
        y = ConcatFromSequence<axis=0>(t) }""",
}
_CONSTANTS = """<int64 zero = {0}, int64 one = {1}, int64 minus = {-1}, int64 two = {2}, int64 three = {3},
    bool truth = {1}, int64[1] oneaxis = {1}, int64[2] parts = {1, 5}, int64[2] five = {1, 4}>"""


@pytest.mark.parametrize("rows", ["n", "3"])
@pytest.mark.parametrize("name", BODIES)
def test_sequences_of_known_lengths(name: str, rows: str) -> None:
    model = _model(f"(float[{rows}, 6] x, float[{rows}, 6] b) => (float[p, q] y)",
                   _CONSTANTS + BODIES[name])
    session, executable = onnxruntime.InferenceSession(model.SerializeToString()), mlc.compile(model, log=False)
    rng = np.random.default_rng(0)
    for n in (1, 2, 9) if rows == "n" else (3,):
        given = {each: rng.standard_normal((n, 6)).astype("float32") for each in "xb"}
        (found,), (wanted,) = executable(**given), session.run(None, given)
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("body", "said"), [
    ("s = SequenceConstruct(x, x) y = SequenceAt(s, three)", "position must be within a sequence of 2, got 3"),
    ("s = SequenceEmpty() y = ConcatFromSequence<axis=0>(s)", "must hold a tensor, but is empty"),
    ("s = SplitToSequence<axis=1>(x, five) y = SequenceAt(s, zero)", "Sum of split values"),
    ("m = ReduceMax<keepdims=0>(x) n = Cast<to=7>(m) y = SplitToSequence(x, n)",
     "how many tensors an output holds must follow from the inputs' shapes, but y of g is a sequence"),
])
def test_what_no_sequence_has_is_said(body: str, said: str) -> None:
    kind = "seq(float[p, q])" if body.endswith("(x, n)") else "float[p, q]"
    with pytest.raises(ModelError, match=said) as caught:
        mlc.compile(_model(f"(float[n, 6] x) => ({kind} y)", f"{_CONSTANTS} {{ {body} }}"), log=False)
    assert "\n" not in str(caught.value)


def test_a_length_that_follows_from_what_is_folded_first() -> None:
    model = _model("(float[4, 6] x) => (float[p, q] y)", """<int64 zero = {0}, int64 one = {1}, int64 two = {2}> {
        size = Shape(x)
        half = Div(size, two)
        same = Mul(half, two)
        r = Reshape(x, same)
        again = Shape(r)
        rows = Gather(again, zero)
        part = Div(rows, two)
        s = SplitToSequence<axis=0>(x, part)
        t = SequenceInsert(s, x, two)
        u = SequenceInsert(t, x, one)
        y = SequenceAt(u, two) }""")
    x = np.random.default_rng(1).standard_normal((4, 6)).astype("float32")
    np.testing.assert_array_equal(mlc.compile(model, log=False)(x)[0], x[2:])
