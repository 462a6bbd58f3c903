"""Exported networks, compiled untuned, against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import mlc
from mlc.cli.models import find_model
from mlc.frontend import load_model
from mlc.networks.inputs import random_inputs
from mlc.networks.models import model_named, vit_tiny


def _compare(model) -> None:
    exe = mlc.compile(model, log=False)
    feeds = random_inputs(exe.inputs)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for ours, theirs in zip(exe(**feeds), expected, strict=True):
        assert ours.shape == theirs.shape
        assert 0.2 < theirs.std() < 5 and len(np.unique(theirs)) > 500
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("name", [pytest.param("mobilenet-v2", marks=pytest.mark.slow), "vit-tiny"])
def test_networks_of_the_command_line(name) -> None:
    _compare(find_model(name).source())


def test_an_image_of_nine_patches_in_a_batch() -> None:
    _compare(vit_tiny(image=48, depth=2, batch=3))


def test_a_batch_of_eight() -> None:
    imported = load_model(model_named("resnet50_b8"))
    assert [i.shape for i in imported.inputs] == [(8, 3, 224, 224)]
    assert [o.shape for o in imported.outputs] == [(8, 1000)]
