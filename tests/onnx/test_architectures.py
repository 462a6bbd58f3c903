"""Architectures that nothing was tuned for, compiled untuned, against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import mlc
from mlc.networks.architectures import SMALL_ARCHITECTURES
from mlc.networks.inputs import random_inputs

#: of each kind one
_QUICK = ("dcgan", "dlrm", "mixer", "qwen2", "roberta", "tcn")


def _marked(name: str) -> object:
    return pytest.param(name, marks=[pytest.mark.slow] * (name not in _QUICK))


@pytest.mark.parametrize("name", [_marked(name) for name in SMALL_ARCHITECTURES])
def test_it_computes_what_onnxruntime_does(name: str) -> None:
    model = SMALL_ARCHITECTURES[name].onnx()
    exe = mlc.compile(model, log=False)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds, others = (random_inputs(exe.inputs, seed) for seed in (0, 1))
    for ours, theirs, other in zip(exe(**feeds), session.run(None, feeds), session.run(None, others), strict=True):
        largest = np.abs(theirs).max()
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert np.abs(theirs - other).max() > 0.01 * largest, "the outputs must tell inputs apart"
        assert np.abs(ours - theirs).max() <= 1e-4 * largest
