"""The decoder that is generated with: the model, what its weights take, and the table."""

from __future__ import annotations

import argparse

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper

import mlc
from tests.performance.decoder import Sizes, decoder, markdown, weight_bytes

SMALL = Sizes(layers=1, width=64, inner=96, heads=4, groups=2, vocabulary=64, capacity=16)


@pytest.mark.slow
def test_the_model_computes_what_onnxruntime_does() -> None:
    model = decoder(SMALL)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ids, empty = np.array([[3, 1, 4, 1, 5]]), np.zeros((1, SMALL.groups, 0, SMALL.head), np.float32)
    past = {each.name: empty for each in session.get_inputs() if each.name.startswith("past")}
    wanted = session.run(["logits"], {"input_ids": ids, "attention_mask": np.ones_like(ids), **past})[0]
    assert 0.3 < wanted.std() < 3, "random weights keep the scale"
    found = mlc.Generator(model, capacity=SMALL.capacity, log=False).logits(ids)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_token_reads_words_and_scales() -> None:
    tensors = [numpy_helper.to_array(tensor) for tensor in decoder(SMALL).graph.initializer]
    words = [a for a in tensors if a.dtype == np.uint8]
    assert weight_bytes(SMALL) == sum(a.nbytes + 4 * a.shape[0] * a.shape[1] for a in words)
    assert weight_bytes(Sizes()) == pytest.approx(647e6, rel=1e-3)


def test_the_table_has_medians_and_failures() -> None:
    turns = {"mlc": [{"seconds": [0.5, 0.02, 0.03, 0.02], "logits": [1.0, -2.0]}], "openvino": []}
    args = argparse.Namespace(layers=1, tokens=3, prompt=4, rounds=1, threads=2, accuracy_level=0)
    rows = markdown(turns, 400_000_000, args).splitlines()
    assert rows[2] == "| mlc | 50.0 | 20.0 | 20.0 | 500 | 0e+00 |"
    assert rows[3] == "| openvino | failed | | | | |"
