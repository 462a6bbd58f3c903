"""Random networks of operators that models use: sound files, of which every one must compile and be right.

A network starts from random inputs and grows (:mod:`tests.fuzz.growing`) by operators of its kind
(:mod:`tests.fuzz.random_operators`). "quantised" ones have integers of 8 bits between most of them, "fused" ones are
what onnxruntime makes of such, with its own operators on integers; "f16" and "bf16" ones are of 16-bit floats
(:mod:`tests.fuzz.growing_smaller`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.fuzz.growing import OPSET, Arrays, Growing
from tests.fuzz.growing_smaller import Halved, Quantised
from tests.fuzz.random_operators import OPERATORS

__all__ = ["KINDS", "Allowed", "Network", "random_network"]

#: what a network starts from, and which operators it is made of
_QUANTISED, _FUSED = "quantised", "fused"
_SHORT: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
KINDS = (
    "image", "sequence", "matrix", "volume", "signal", "mixed", "free image", "free sequence", "free matrix",
    *(f"{how} {kind}" for how in (_QUANTISED, _FUSED) for kind in ("image", "sequence", "matrix", "mixed")),
    *(f"{how} {kind}" for how in _SHORT for kind in ("image", "sequence", "mixed")),
)
_TRIES = 12
#: Of the largest output: what Winograd's algorithm and another order of sums may cost one kernel, and a network by how
#: far noise of a few roundings moves it. Noise of 16-bit floats is that of every operator, which fused ones do not have
_ONE_KERNEL, _BY_NOISE = 5e-5, 30.0
_BY_ROUNDING = 6.0
#: by how far integers that are one step off in many places move a network, and the part of a step that results may be
#: off on average: that of a few of many, or of two elements
_BY_STEPS, _OF_A_STEP, _FEW = 3.0, 0.01, 2


@dataclass(frozen=True)
class Allowed:
    """How far any element of an output may be off, and all of them on average."""

    most: float
    average: float


@dataclass(frozen=True)
class Network:
    """A model and, for one or two sizes of its free dimensions, inputs, outputs, how far noise moves those, and how far
    they may be off."""

    model: onnx.ModelProto
    inputs: Sequence[Arrays]
    outputs: Sequence[Arrays]
    moved: Sequence[dict[str, float]]
    allowed: Sequence[dict[str, Allowed]]


def _start(g: Growing, kind: str, free: bool) -> None:
    r = g.rng
    shapes: dict[str, list[int]] = {
        "image": [r.choice((1, 1, 2, 3)), r.choice((1, 3, 4, 8, 12, 16, 32)), r.randint(5, 30), r.randint(5, 30)],
        "sequence": [r.choice((1, 2, 3)), r.randint(2, 20), r.choice((8, 12, 16, 33, 64))],
        "matrix": [r.randint(1, 40), r.choice((1, 5, 16, 31, 64, 100))],
        "volume": [r.choice((1, 2)), r.choice((1, 3, 8)), r.randint(4, 9), r.randint(4, 9), r.randint(4, 9)],
        "signal": [r.choice((1, 2)), r.choice((1, 4, 8, 16)), r.randint(8, 60)],
    }
    shapes["mixed"] = shapes[r.choice(tuple(shapes))]
    g.exact, g.noisy = [{} for _ in range(g.sizes)], [{} for _ in range(g.sizes)]
    loose = [0] if kind != "image" or r.random() < 0.5 else [2, 3]
    if kind == "sequence" and r.random() < 0.5:
        loose = [0, 1]
    other = [size if i not in loose else max(1, size + r.choice((-1, 1, 2, 5))) for i, size in enumerate(shapes[kind])]
    for i in range(r.choice((1, 1, 2))):
        name = f"x{i}"
        g.inputs[name] = [f"n{k}" if free and k in loose else size for k, size in enumerate(shapes[kind])]
        for arrays, noisy, shape in zip(g.exact, g.noisy, (shapes[kind], other), strict=False):
            arrays[name] = noisy[name] = g.stored(g.numbers.normal(0, 1, shape).astype(np.float32))
        g.unrounded.add(name)


def random_network(rng: Random, kind: str, nodes: int) -> Network:
    """A network of a kind of :data:`KINDS` with about so many nodes; those that are free are evaluated at two sizes."""
    how, _, name = kind.rpartition(" ")
    numbers = np.random.default_rng(rng.getrandbits(32))
    g: Growing
    if how in _SHORT:
        g = Halved(rng, numbers, 1, dtype=_SHORT[how])
    elif how in (_QUANTISED, _FUSED):
        g = Quantised(rng, numbers, 1, plain=how == _FUSED)
    else:
        g = Growing(rng, numbers, 2 if how else 1)
    _start(g, name, how == "free")
    if isinstance(g, Quantised):
        nodes *= 3  # most are conversions
        for each in [n for n in g.inputs if rng.random() < 0.8]:
            g.quantise(each)
    for _ in range(_TRIES * nodes):
        if len(g.nodes) >= nodes:
            break
        rng.choice(OPERATORS[name])(g)
    return _finished(g, how)


def _finished(g: Growing, how: str) -> Network:
    read = {n for node in g.nodes for n in node.input}
    made = [n for node in g.nodes for n in node.output]
    outputs = [n for n in made if n not in read or g.rng.random() < 0.1]
    short = _SHORT.get(how)

    def typed(array: np.ndarray) -> np.ndarray:
        return array.astype(short) if short is not None and array.dtype == np.float32 else np.asarray(array)

    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(typed(g.exact[0][n]).dtype), dims)
             for n, dims in g.inputs.items()]
    used = [n for n in g.weights if n in read]
    ends = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(typed(g.exact[0][n]).dtype),
                                          [None] * g.exact[0][n].ndim) for n in outputs]
    graph = helper.make_graph(g.nodes, "random", infos, ends,
                              [numpy_helper.from_array(typed(g.weights[n]), n) for n in used])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    if short is not None:
        _cast_to(model, helper.np_dtype_to_tensor_dtype(np.dtype(short)))
    results = [{n: typed(a[n]) for n in outputs} for a in g.exact]
    if how == _FUSED:
        model, results = _by_onnxruntime(model, [{n: a[n] for n in g.inputs} for a in g.exact], results)
    off = [{n: np.abs(np.subtract(a[n], b[n], dtype="f8")) for n in outputs}
           for a, b in zip(g.exact, g.noisy, strict=True)]
    return Network(
        model, [{n: typed(a[n]) for n in g.inputs} for a in g.exact],
        results,
        [{n: float(each.max()) for n, each in every.items()} for every in off],
        [{n: _allowed(g, n, each, a[n]) for n, each in every.items()} for every, a in zip(off, g.exact, strict=True)])


def _allowed(g: Growing, name: str, off: np.ndarray, wanted: np.ndarray) -> Allowed:
    """By what noise moved an output, the kind of noise and the output's largest."""
    rounding = _ONE_KERNEL * max(1e-3, float(np.abs(wanted.astype("f8")).max()))
    if isinstance(g, Quantised):
        step = 1.0 if wanted.dtype.kind in "iu" else g.steps.get(name, 0.0)
        return Allowed(rounding + step + _BY_STEPS * float(off.max()),
                       rounding + max(_OF_A_STEP, min(1.0, _FEW / off.size)) * step + _BY_STEPS * float(off.mean()))
    if isinstance(g, Halved):
        size = np.abs(wanted.astype("f8"))
        return Allowed(g.noise * float(size.max()) + _BY_ROUNDING * float(off.max()),
                       g.noise * float(size.mean()) + _BY_ROUNDING * float(off.mean()))
    most = rounding + _BY_NOISE * float(off.max())
    return Allowed(most, most)


def _cast_to(model: onnx.ModelProto, dtype: int) -> None:
    """Let casts to float32 be to ``dtype``."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = dtype


def _by_onnxruntime(
    model: onnx.ModelProto, inputs: Sequence[Arrays], results: Sequence[Arrays]
) -> tuple[onnx.ModelProto, list[Arrays]]:
    """The model as onnxruntime would run it, and what it makes of that: with operators on integers where they were
    between conversions, and weights of integers beside operands that are. The model as it is where onnxruntime's own
    rewrites fail, or what they wrote does not run."""
    import onnxruntime as ort

    options = _options(ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED)
    # of weights in blocks: activations are float32
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "fused.onnx")
        try:
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            fused = onnx.load(options.optimized_model_filepath)
            session = ort.InferenceSession(fused.SerializeToString(), _options(
                ort.GraphOptimizationLevel.ORT_DISABLE_ALL), providers=["CPUExecutionProvider"])
            return fused, [dict(zip(wanted, map(np.asarray, session.run(list(wanted), each)), strict=True))
                           for each, wanted in zip(inputs, results, strict=True)]
        except Exception:  # of whichever of its types
            return model, list(results)


def _options(level: Any) -> Any:
    """Of a session of onnxruntime that takes no instructions that saturate."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = level
    options.add_session_config_entry("session.x64quantprecision", "1")
    return options
