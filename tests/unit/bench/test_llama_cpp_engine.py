"""The decoder's weights as llama.cpp reads them: the numbers of the ONNX model, in another order."""

from __future__ import annotations

import numpy as np
import pytest

from tests.performance import llama_cpp_engine as engine

RNG = np.random.default_rng(0)


def _decoded(rows: np.ndarray) -> np.ndarray:
    """The weights of rows of ``Q4_0``, element by element as llama.cpp's documentation of the type has it."""
    out = np.empty((len(rows), rows.shape[1] // 18 * 32))
    for row, data in enumerate(rows):
        for block in range(len(data) // 18):
            piece = data[18 * block : 18 * (block + 1)]
            scale = float(piece[:2].copy().view(np.float16)[0])
            for j, byte in enumerate(piece[2:]):
                out[row, 32 * block + j] = (int(byte) % 16 - 8) * scale
                out[row, 32 * block + 16 + j] = (int(byte) // 16 - 8) * scale
    return out


def test_packed_products_are_those_of_matmulnbits() -> None:
    ort = pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper

    packed = RNG.integers(0, 256, (5, 3, 16), np.uint8)
    scales = RNG.uniform(0.5, 1.5, 15).astype(np.float16).astype(np.float32)
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=96, N=5, bits=4,
                            block_size=32)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [96, 96])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [96, 5])],
        [numpy_helper.from_array(packed, "w"), numpy_helper.from_array(scales, "s")])
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
    (weights,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(
        None, {"x": np.eye(96, dtype=np.float32)})
    np.testing.assert_allclose(_decoded(engine.q4_0(packed, scales)), weights.T, rtol=1e-6)


def test_neighbours_are_what_halves_were() -> None:
    """The two rows that a position turns with each other stay a pair, in the same order."""
    heads, size = 3, 8
    rows = RNG.standard_normal((heads * size, 2))
    halves = rows.reshape(heads, 2, size // 2, 2)
    pairs = engine.rotated_in_pairs(rows, heads).reshape(heads, size // 2, 2, 2)
    for half in range(2):
        np.testing.assert_array_equal(pairs[:, :, half], halves[:, half])
