"""Real models import whole: static, weights as constants, only the model's inputs as parameters."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from tvm import relax

from mlc.frontend import load_model
from mlc.networks.inputs import random_inputs
from mlc.networks.light import LIGHT_MODELS, light_model, light_path
from mlc.networks.models import model_named


@functools.cache
def small(name):
    return model_named(name)


@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_light_models_import(name):
    imported = load_model(light_path(name))
    (image,) = imported.inputs
    assert image.shape == (1, 3, 224, 224) and image.dtype == "float32"
    (logits,) = imported.outputs
    assert np.prod(logits.shape) == 1000
    assert len(imported.mod["main"].params) == 1
    calls = [b.value for block in imported.mod["main"].body.blocks for b in block.bindings]
    operators = {c.op.name for c in calls if isinstance(c, relax.Call)}
    assert "relax.nn.conv2d" in operators
    assert not operators & {"relax.shape_of", "relax.shape_to_tensor", "relax.nn.dropout", "relax.stack", "relax.full"}


@pytest.mark.parametrize("name", ["squeezenet", "bert_tiny", "gpt2_tiny"])
def test_numbers_of_small_models(name):
    model = small(name)
    imported = load_model(model)
    feeds = random_inputs(imported.inputs)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    built = tvm.compile(imported.mod, tvm.target.Target("llvm"))
    arguments = [tvm.runtime.tensor(feeds[s.name]) for s in imported.inputs]
    result = relax.VirtualMachine(built, tvm.cpu())["main"](*arguments)
    results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    for ours, theirs, spec in zip(results, expected, imported.outputs, strict=True):
        assert ours.shape == theirs.shape == spec.shape
        assert np.abs(ours.numpy() - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_filled_weights_make_outputs_that_depend_on_everything(name):
    """Activations near one, an output that differs across classes and inputs: a wrong program cannot pass by luck."""
    model = light_model(name)
    onnx.checker.check_model(model)
    assert len(model.graph.input) == 1
    softmax = model.graph.node[-1]
    assert softmax.op_type == "Softmax"
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(softmax.input[0]))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    image = session.get_inputs()[0].name
    rng = np.random.default_rng(1)
    first, second = (
        session.run(None, {image: rng.standard_normal((1, 3, 224, 224), dtype=np.float32)})[1].reshape(-1)
        for _ in range(2)
    )
    assert 0.2 < first.std() < 5
    assert len(np.unique(first)) > 500
    assert np.abs(first - second).max() > 1e-2 * np.abs(first).max()


def test_filling_is_the_same_every_time_and_differs_by_seed():
    first, again, other = light_model("squeezenet"), light_model("squeezenet"), light_model("squeezenet", seed=1)
    assert first.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    assert first.SerializeToString(deterministic=True) != other.SerializeToString(deterministic=True)


def test_unknown_light_model_lists_the_names():
    with pytest.raises(KeyError, match="squeezenet"):
        light_model("lenet")
