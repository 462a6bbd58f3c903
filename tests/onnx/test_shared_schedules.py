"""Layers of a quantised model that differ by scales and zero points alone: one task, and numbers of their own.

Whatever schedule was found for one of them is replayed on another, and must compute to the bit what the loops of the
other one as they stand do; the whole model is compared with onnx's evaluator.
"""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import mlc
from mlc.compilation import Compilation
from mlc.graph.task import Task
from mlc.graph.tasks import called_functions
from mlc.log import Record, TuningLog
from mlc.target import Target, resolve
from mlc.testing.targets import runs
from mlc.tuning.candidate import TaskSpace
from schedules.lowering import PIPELINE
from schedules.trace import replay

#: AVX2 alone where there is more, and what this machine has: dot products of bytes, maybe
TARGETS = ["native", *([pytest.param("x86-64-v3", marks=pytest.mark.slow)] if runs("x86-64-v3") else [])]
CHANNELS, SIZE = 32, 10
_BLOCKS = 3  # the last one ends in another layout


@cache
def _blocks() -> onnx.ModelProto:
    """Residual blocks, ``y = q(dq(x) + dq(q(conv(dq(x)))))``, whose scales and zero points all differ."""
    rng = np.random.default_rng(5)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def constant(array: np.ndarray) -> str:
        weights.append(numpy_helper.from_array(array, f"c{len(weights)}"))
        return weights[-1].name

    def node(op: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, list(inputs), [f"n{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    def scale() -> tuple[str, str]:
        return (constant(np.float32(rng.uniform(0.01, 0.05))), constant(np.uint8(rng.integers(90, 170))))

    of_x = scale()
    x = node("QuantizeLinear", "x", *of_x)
    for _ in range(_BLOCKS):
        image = node("DequantizeLinear", x, *of_x)
        kernel = constant(rng.integers(-127, 128, (CHANNELS, CHANNELS, 1, 1)).astype(np.int8))
        sizes = constant(rng.uniform(0.001, 0.004, CHANNELS).astype(np.float32))
        weight = node("DequantizeLinear", kernel, sizes, constant(np.zeros(CHANNELS, np.int8)), axis=0)
        of_conv, of_sum = scale(), scale()
        conv = node("QuantizeLinear", node("Conv", image, weight), *of_conv)
        total = node("Add", node("DequantizeLinear", conv, *of_conv), image)
        x, of_x = node("QuantizeLinear", total, *of_sum), of_sum
    shape = [1, CHANNELS, SIZE, SIZE]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    result = helper.make_tensor_value_info(x, TensorProto.UINT8, shape)
    graph = helper.make_graph(nodes, "blocks", [given], [result], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _image() -> np.ndarray:
    return np.random.default_rng(1).uniform(-4, 4, (1, CHANNELS, SIZE, SIZE)).astype(np.float32)


@cache
def _alike(target: Target) -> list[list[Task]]:
    """The model's functions where several have one key."""
    groups = defaultdict(list)
    for found in called_functions(Compilation.of(_blocks(), target, substitutions=False).lowered().module, target):
        groups[found.task.key].append(found.task)
    return [group for group in groups.values() if len(group) > 1]


def _ran(func: tvm.tirx.PrimFunc, arrays: list[np.ndarray], target: Target) -> np.ndarray:
    tvm.get_global_func("runtime.config_threadpool")(1, target.threads)
    made = tvm.compile(tvm.IRModule({"main": func}), target=target.tvm, tir_pipeline=PIPELINE)
    tensors = [tvm.runtime.tensor(each) for each in arrays]
    made["main"](*tensors)
    return np.asarray(tensors[-1].numpy())


def _random(func: tvm.tirx.PrimFunc) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    arrays = []
    for param in func.params:
        shape, dtype = tuple(map(int, param.shape)), np.dtype(str(param.dtype))
        whole = np.iinfo(dtype) if dtype.kind in "iu" else None
        wide = (max(whole.min, -3000), min(whole.max, 3000) + 1) if whole else (0, 0)
        arrays.append(rng.integers(*wide, shape).astype(dtype) if whole else
                      rng.uniform(0.001, 0.1, shape).astype(dtype))
    return arrays


@pytest.mark.parametrize("name", TARGETS)
def test_a_schedule_found_for_one_computes_the_others_to_the_bit(name: str) -> None:
    target = resolve(name, threads=2)
    (alike,) = _alike(target)
    assert "conv2d" in alike[0].name and len({task.identity for task in alike}) == len(alike) == _BLOCKS - 1
    one, other = alike[0], alike[-1]
    space, rng = TaskSpace(one), random.Random(0)
    points = (*list(space.seeds())[:2], *(space.sample(rng) for _ in range(60)))  # of which narrow vectors take few
    found = list(islice((candidate for candidate in map(space.realise, points) if candidate is not None), 3))
    assert len(found) > 2
    results = []
    for task in (one, other):
        arrays = _random(task.func)
        expected = _ran(task.func, arrays, target)
        assert len(np.unique(expected)) > 100, "numbers must not all saturate"
        results.append(expected)
        for candidate in found[:2]:
            sch = replay(task.func, candidate.trace, target.tvm)
            np.testing.assert_array_equal(_ran(sch.mod["main"], arrays, target), expected)
    assert (results[0] != results[1]).mean() > 0.5, "they must be two functions"


def test_the_model_is_right_with_a_schedule_of_one_block(tmp_path: Path) -> None:
    target = resolve("native", threads=2)
    (alike,) = _alike(target)
    space = TaskSpace(alike[1])
    last = [candidate for candidate in map(space.realise, space.seeds()) if candidate is not None][-1]
    path = tmp_path / "one.db"
    with TuningLog(path) as log:
        log.append([Record(last.task.key, last.task.name, last.space, dict(last.decisions), last.trace, (1e-6,))])
    exe, plain = (mlc.compile(_blocks(), target=target, log=log, substitutions=False) for log in (path, False))
    assert [f["source"] for f in exe.metadata["functions"]].count("log") == len(alike)
    (got,), (untuned,) = exe(_image()), plain(_image())
    (expected,) = ReferenceEvaluator(_blocks()).run(None, {"x": _image()})
    np.testing.assert_array_equal(got, untuned)
    assert np.abs(got.astype(int) - expected).max() <= 1 and (got != expected).mean() < 0.02
    assert len(np.unique(got)) > 100
