"""Models of a few quantised operators, and their numbers by importer, onnx's reference and onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import tvm
from onnx import helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as KernelMissing
from tvm import relax

from mlc.cpu import host_flags
from mlc.frontend import load_model
from mlc.graph.ir.rewrite import bindings, op_name

MICROSOFT = "com.microsoft"


def model_of(
    nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, np.ndarray], constants: Mapping[str, np.ndarray],
    outputs: Mapping[str, tuple[str, int]], opset: int = 21,
) -> onnx.ModelProto:
    """Inputs are of the types and shapes of ``feeds``; ``outputs`` says type and rank."""
    def kind(dtype: object) -> int:
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    graph = helper.make_graph(
        list(nodes), "quantised",
        [helper.make_tensor_value_info(name, kind(array.dtype), array.shape) for name, array in feeds.items()],
        [helper.make_tensor_value_info(name, kind(dtype), [f"{name}_{i}" for i in range(rank)])
         for name, (dtype, rank) in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def imported_numbers(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The imported module as TVM alone compiles it: what the importer says, whatever later passes make of it."""
    found = load_model(model)
    built = tvm.compile(found.mod, tvm.target.Target("llvm"))
    arguments = [tvm.runtime.tensor(feeds[spec.name]) for spec in found.inputs]
    result = relax.VirtualMachine(built, tvm.cpu())["main"](*arguments)
    results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [each.numpy() for each in results]


def onnxruntime_numbers(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Without its rewrites, but for the one that avoids products of bytes that saturate on CPUs that lack VNNI."""
    levels = onnxruntime.GraphOptimizationLevel
    if {"avx512_vnni", "avx_vnni"}.isdisjoint(host_flags() or ()):
        try:
            return _session(model, levels.ORT_ENABLE_EXTENDED).run(None, dict(feeds))
        except KernelMissing:  # it leaves products of two signed operands without a kernel, which do not saturate
            pass
    return _session(model, levels.ORT_DISABLE_ALL).run(None, dict(feeds))


def _session(model: onnx.ModelProto, level: onnxruntime.GraphOptimizationLevel) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.graph_optimization_level = level
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def operators(model: onnx.ModelProto) -> list[str]:
    """The operators of the imported module, in order."""
    values = [binding.value for binding in bindings(load_model(model).mod["main"])]
    return [op_name(value) for value in values if isinstance(value, relax.Call)]


def extremes(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Random integers of the whole range, of which a third are its ends."""
    info = np.iinfo(dtype)
    array = rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
    ends = rng.choice(np.array([info.min, info.max], dtype), shape)
    return np.where(rng.uniform(size=shape) < 1 / 3, ends, array)
