"""Recurrent layers whose steps or rows follow from a free size, against onnxruntime at both ends of ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import mlc
from schedules.cpu.recurrent import RECURRENT

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_STRIDED = """{
    c = Conv<strides=[%d], pads=[2, 2]>(x, k)
    t = Transpose<perm=[2, 0, 1]>(c)
    y, last = %s<hidden_size=21, direction="%s">(t, w, r, bias) }"""


def _model(
    shape: Sequence[int | str], body: str, weights: Mapping[str, Sequence[int]], results: str
) -> onnx.ModelProto:
    dims = ", ".join(map(str, shape))
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g (float[{dims}] x) => ({results}) {body}')
    rng = np.random.default_rng(1)
    for name, sizes in weights.items():
        model.graph.initializer.append(
            numpy_helper.from_array(rng.standard_normal(sizes).astype("float32") / 4, name))
    return model


def _check(model: onnx.ModelProto, shape: Sequence[str | int], shapes: str, sizes: Sequence[Mapping[str, int]]) -> None:
    rng, session = np.random.default_rng(2), onnxruntime.InferenceSession(model.SerializeToString())
    executable = mlc.compile(model, shapes={"x": shapes}, log=False)
    for each in sizes:
        x = rng.standard_normal([each.get(str(d), d) for d in shape]).astype("float32")
        for found, wanted in zip(executable(x), session.run(None, {"x": x}), strict=True):
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("operator", "stride", "direction"), [
    ("LSTM", 4, "forward"), ("LSTM", 2, "bidirectional"), ("GRU", 3, "reverse"), ("RNN", 2, "forward"),
])
def test_steps_of_a_strided_convolution(operator: str, stride: int, direction: str) -> None:
    gates, ways = 21 * GATES[operator], 2 if direction == "bidirectional" else 1
    weights = {"k": (6, 3, 5), "w": (ways, gates, 6), "r": (ways, gates, 21), "bias": (ways, 2 * gates)}
    results = "float[s, w, b, u] y, float[w, b, u] last"
    model = _model(("b", 3, "n"), _STRIDED % (stride, operator, direction), weights, results)
    ends = [{"b": b, "n": n} for n in (1, 2, stride, stride + 1, 37, 199, 200) for b in (1, 3)]
    _check(model, ("b", 3, "n"), "1..3,3,1..200", ends)


def test_twice_as_many_steps_as_rows_of_the_input() -> None:
    body = """<int64[3] halves = {0, -1, 6}> {
        h = Reshape(x, halves)
        t = Transpose<perm=[1, 0, 2]>(h)
        y, last = LSTM<hidden_size=8>(t, w, r) }"""
    model = _model(("b", "n", 12), body, {"w": (1, 32, 6), "r": (1, 32, 8)},
                   "float[s, w, b, u] y, float[w, b, u] last")
    _check(model, ("b", "n", 12), "2,1..40,12", [{"b": 2, "n": n} for n in (1, 2, 19, 39, 40)])


def test_rows_that_follow_from_two_sizes() -> None:
    """A layer over the rows of pictures, which lie in the batch."""
    body = """<int64[3] lines = {-1, 20, 6}> {
        l = Reshape(x, lines)
        t = Transpose<perm=[1, 0, 2]>(l)
        y, last = GRU<hidden_size=8>(t, w, r) }"""
    model = _model(("b", "n", 20, 6), body, {"w": (1, 24, 6), "r": (1, 24, 8)},
                   "float[s, w, b, u] y, float[w, b, u] last")
    _check(model, ("b", "n", 20, 6), "1..3,1..9,20,6", [{"b": b, "n": n} for b in (1, 3) for n in (1, 4, 9)])


@pytest.mark.parametrize("rows", [1, 2])
def test_steps_and_rows_that_both_follow_from_a_size(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an image as steps, the columns of all images as rows, of which a tile has in registers as many as any
    vectors have room for."""
    seeds = type(RECURRENT).seeds
    monkeypatch.setattr(type(RECURRENT), "seeds", lambda *of: ({**seed, "m": rows} for seed in seeds(*of)))
    body = """<int64[3] lines = {0, -1, 4}> {
        c = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(x, k)
        t = Transpose<perm=[2, 0, 3, 1]>(c)
        l = Reshape(t, lines)
        y, last = LSTM<hidden_size=8>(l, w, r) }"""
    gates = 8 * GATES["LSTM"]
    model = _model(("b", 3, "h", "v"), body, {"k": (4, 3, 3, 3), "w": (1, gates, 4), "r": (1, gates, 8)},
                   "float[s, w, b, u] y, float[w, b, u] last")
    sizes = [{"b": b, "h": h, "v": v} for b, h, v in ((1, 1, 1), (2, 40, 9), (1, 39, 10), (2, 2, 1), (1, 17, 5))]
    _check(model, ("b", 3, "h", "v"), "1..2,3,1..40,1..10", sizes)
