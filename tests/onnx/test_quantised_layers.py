"""Every layer of a quantised model: given the integers before it, within one step of the reference evaluator's.

Of a whole deep model little can be said: where a sum lies half-way between two integers any other order of float32 sums
takes the other one, and every step that one layer is off brings more of the next to such places. So a model is cut at
all of its quantised tensors. mlc runs it whole, with those as outputs, and onnx's reference evaluator computes each of
them from mlc's own of the layers before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import QuantFormat, QuantType
from test_quantised_models import MODELS, TARGET, _feeds, _static

import mlc

#: part of a tensor that may be off by a step: exact sums and those of float32 meet at few halves
_OFF = 0.01
_EVALUATED = 19


def _quantised(model: onnx.ModelProto) -> dict[str, int]:
    """The tensors that the model quantises, and their types."""
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {node.output[0]: kinds[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"}


def _exposed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its quantised tensors as its outputs."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    inferred = onnx.shape_inference.infer_shapes(model)
    ranks = {each.name: len(each.type.tensor_type.shape.dim) for each in inferred.graph.value_info}
    del found.graph.output[:]
    found.graph.output.extend(
        helper.make_tensor_value_info(name, kind, [None] * ranks[name]) for name, kind in _quantised(model).items())
    return found


def _cut(exposed: onnx.ModelProto) -> onnx.ModelProto:
    """The exposed model, whose layers read their integers from inputs of the names of those with ``.given``."""
    found = onnx.ModelProto()
    found.CopyFrom(exposed)
    kinds = _quantised(exposed)
    for node in found.graph.node:
        for place, name in enumerate(node.input):
            if name in kinds:
                node.input[place] = f"{name}.given"
    for output in exposed.graph.output:
        given = onnx.ValueInfoProto()
        given.CopyFrom(output)
        given.name = f"{output.name}.given"
        found.graph.input.append(given)
    for each in found.opset_import:  # the first that the evaluator has conversions of
        each.version = each.version if each.domain else max(each.version, _EVALUATED)
    return found


def _compare(model: onnx.ModelProto, target: str, feeds: Mapping[str, np.ndarray]) -> dict[str, tuple[int, float]]:
    """By how many steps each quantised tensor is off at most, and how much of it."""
    exposed = _exposed(model)
    names = [each.name for each in exposed.graph.output]
    found = dict(zip(names, mlc.compile(exposed, target=target, log=False)(**feeds), strict=True))
    given = {f"{name}.given": array for name, array in found.items()}
    wanted = ReferenceEvaluator(_cut(exposed)).run(None, {**feeds, **given})
    off = {name: np.abs(found[name].astype(np.int32) - each) for name, each in zip(names, wanted, strict=True)}
    assert all(found[name].dtype == each.dtype and len(np.unique(each)) > 3 for name, each in
               zip(names, wanted, strict=True)), "tensors of a few numbers show nothing"
    return {name: (int(each.max()), float((each > 0).mean())) for name, each in off.items()}


def _assert_within_a_step(off: Mapping[str, tuple[int, float]]) -> None:
    assert all(most <= 1 and part <= _OFF for most, part in off.values()), {
        name: each for name, each in off.items() if each[0] > 1 or each[1] > _OFF}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convolutions", "encoder"])
def test_layers_are_within_a_step(name: str, tmp_path: Path) -> None:
    assert name in MODELS
    model = _static(name, tmp_path, quant_format=QuantFormat.QDQ, activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8, per_channel=True)
    off = _compare(model, TARGET, _feeds(name, 11))
    assert len(off) > 10
    _assert_within_a_step(off)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["native", "x86-64-v3"])
@pytest.mark.parametrize("network", ["mobilenet_v2", "inception_v1", "resnet50", "bert_base"])
def test_layers_of_benchmark_models_are_within_a_step(network: str, target: str, tmp_path: Path) -> None:
    from mlc.bench.engines import onnx_inputs
    from mlc.networks.inputs import random_inputs
    from mlc.testing.targets import runs
    from tuning_logs.quantised import quantised

    if not runs(target):
        pytest.skip(f"this machine is no {target}")
    path = quantised(f"{network}-qdq", tmp_path)
    off = _compare(onnx.load(path), target, random_inputs(onnx_inputs(str(path)), seed=3))
    assert len(off) > 50
    _assert_within_a_step(off)
