"""Loops of known length and branches, against onnx's reference and onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import mlc
from mlc.errors import ModelError

RNG = np.random.default_rng(3)
HEADER = '<ir_version: 10, opset_import: ["" : 19]>\n'


def compared(text: str, *arrays: np.ndarray) -> list[np.ndarray]:
    model = parser.parse_model(HEADER + text)
    onnx.checker.check_model(model)
    feeds = {value.name: array for value, array in zip(model.graph.input, arrays, strict=True)}
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    got = mlc.compile(model, log=False, values={})(*arrays)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return got


LOOP = """agraph (float[3, 4] x, float[4] w) => (float[3, 4] y, float[5, 3] sums)
<int64 count = {count}, bool go = {{1}}, int64[1] last = {{1}}> {{
  y, sums = Loop (count, go, x) <
      body = step (int64 i, bool on, float[3, 4] s) => (bool off, float[3, 4] t, float[3] m) {{
    off = Identity (on)
    f = Cast <to = 1> (i)
    a = Mul (s, w)
    b = Add (a, f)
    t = Tanh (b)
    m = ReduceSum <keepdims = 0> (t, last)
  }}>
}}"""


def test_a_loop_of_known_length_reads_its_step_and_the_graph_around_it() -> None:
    compared(LOOP.format(count="{5}"), *(RNG.standard_normal(s, dtype="float32") for s in ((3, 4), (4,))))


def test_a_loop_whose_condition_depends_on_data_is_refused() -> None:
    text = LOOP.format(count="{5}").replace("off = Identity (on)", "n = ReduceMax <keepdims = 0> (s)\n"
                                            "lim = Constant <value = float {3.0}> ()\noff = Less (n, lim)")
    with pytest.raises(ModelError, match="must leave its condition as it is") as refused:
        mlc.compile(parser.parse_model(HEADER + text), values={})
    assert "\n" not in str(refused.value)


def test_a_loop_of_too_many_steps_is_refused() -> None:
    with pytest.raises(ModelError, match="take fewer steps"):
        mlc.compile(parser.parse_model(HEADER + LOOP.format(count="{1000000}").replace("5, 3", "n, 3")), values={})


@pytest.mark.parametrize("backward", [0, 1])
def test_a_scan_is_a_recurrent_layer(backward: int) -> None:
    text = """agraph (float[2, 3] h, float[6, 2, 3] x, float[3, 3] w) => (float[2, 3] last, float[6, 2, 3] all) {
      last, all = Scan <num_scan_inputs = 1, scan_input_directions = [TURN], scan_output_directions = [TURN],
      body = step (float[2, 3] s, float[2, 3] e) => (float[2, 3] t, float[2, 3] copy) {
        m = MatMul (s, w)
        a = Add (m, e)
        t = Sigmoid (a)
        copy = Identity (t)
      }> (h, x)
    }"""
    compared(text.replace("TURN", str(backward)),
             *(RNG.standard_normal(s, dtype="float32") for s in ((2, 3), (6, 2, 3), (3, 3))))


BRANCHES = """agraph (bool c, float[3, 4] x) => (float[3, 4] y) {
  y = If (c) <then_branch = one () => (float[3, 4] a) { a = Exp (x) },
    else_branch = other () => (float[SHAPE] b) { NODES }>
}"""


def branches(shape: str, nodes: str) -> str:
    return BRANCHES.replace("SHAPE", shape).replace("NODES", nodes)


@pytest.mark.parametrize("condition", [True, False])
def test_of_two_branches_the_one_is_chosen(condition: bool) -> None:
    text = branches("3, 4", "d = Neg (x)\n b = Tanh (d)")
    compared(text, np.array(condition), RNG.standard_normal((3, 4), dtype="float32"))


def test_branches_of_different_shapes_are_refused() -> None:
    text = branches("4, 3", "b = Transpose (x)").replace("=> (float[3, 4] y)", "=> (float[n, m] y)")
    with pytest.raises(ModelError, match="output in both branches"):
        mlc.compile(parser.parse_model(HEADER + text), values={})


@pytest.mark.parametrize("turned", [0, 1])
def test_a_scan_of_opset_8_is_of_a_batch(turned: int) -> None:
    """Against numpy: onnxruntime has none of its length."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 8]>
        g (float[2, 3] s, float[2, 5, 3] x, float[2, 5, 3] z) => (float[2, 3] last, float[2, 5, 3] all) {
        last, all = Scan <num_scan_inputs = 2, directions = [TURN, 0], body = step
            (float[3] before, float[3] here, float[3] other) => (float[3] after, float[3] out) {
            a = Mul(before, other)
            after = Add(a, here)
            out = Neg(after) }> (, s, x, z) }""".replace("TURN", str(turned)))
    rng = np.random.default_rng(0)
    s, x, z = (rng.standard_normal(shape).astype("float32") for shape in ((2, 3), (2, 5, 3), (2, 5, 3)))
    last, every = mlc.compile(model, log=False)(s, x, z)
    wanted, state = [], s
    for step in range(5):
        state = state * z[:, step] + x[:, 4 - step if turned else step]
        wanted.append(-state)
    np.testing.assert_allclose(last, state, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(every, np.stack(wanted, 1), rtol=1e-4, atol=1e-5)
