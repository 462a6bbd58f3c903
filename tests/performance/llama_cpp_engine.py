"""The decoder of :mod:`tests.performance.decoder` as llama.cpp reads it, and as an engine beside the others.

``pip install llama-cpp-python gguf`` builds llama.cpp for the machine; where either is missing there is no such engine.
The file has the numbers of the ONNX model: blocks of 32 weights of 4 bits with a scale, which llama.cpp calls ``Q4_0``
and keeps in 16 bits (a rounding by at most one part in 2,048), norms and the table of tokens in float32. llama.cpp
rounds activations to 8 bits for such products, as ``accuracy_level`` 4 allows the other engines.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx

__all__ = ["installed", "q4_0", "rotated_in_pairs", "step", "write"]

#: weights of a block
_BLOCK = 32
#: the products of a layer in the order of the ONNX model's nodes
_PRODUCTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def installed() -> bool:
    """Whether both packages are there."""
    return all(find_spec(name) is not None for name in ("llama_cpp", "gguf"))


def step(path: Path, threads: int, capacity: int) -> Callable[[np.ndarray | None], np.ndarray]:
    """Token ids ``[1, n]`` after those before them to logits of the last one; None forgets them all."""
    import llama_cpp

    file = path.with_suffix(".gguf")
    if not file.exists():
        write(path, file, capacity)
    model = llama_cpp.Llama(str(file), n_ctx=capacity, n_threads=threads, n_threads_batch=threads, verbose=False)
    words = model.n_vocab()

    def evaluated(ids: np.ndarray | None) -> np.ndarray:
        if ids is None:
            model.reset()
            return np.empty(0)
        model.eval(ids[0].tolist())
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return np.array(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (words,)))

    return evaluated


def write(model: Path, file: Path, capacity: int) -> None:
    """The ONNX decoder in ``model`` as a GGUF file; its heads and groups are those of its first attention."""
    import gguf
    import onnx

    graph = onnx.load(model).graph
    attention = {a.name: a.i for a in next(n for n in graph.node if n.op_type == "GroupQueryAttention").attribute}
    heads, groups = attention["num_heads"], attention["kv_num_heads"]
    weights = dict(_weights(graph, heads, groups))
    layers = sum(name.endswith("attn_q.weight") for name in weights)
    words, width = weights["token_embd.weight"].shape
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(capacity)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(len(weights["blk.0.ffn_up.weight"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("no_vocab")
    for name, array in weights.items():
        packed = array.dtype == np.uint8
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.Q4_0 if packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(graph: onnx.GraphProto, heads: int, groups: int) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors by llama.cpp's names: bytes of packed products ``[columns, bytes]``, float32 otherwise."""
    from onnx import numpy_helper

    arrays = {tensor.name: tensor for tensor in graph.initializer}

    def value(name: str) -> np.ndarray:
        return numpy_helper.to_array(arrays[name])

    norms, products = [], []
    for node in graph.node:
        if node.op_type == "Gather" and node.input[1] == "input_ids":
            yield "token_embd.weight", value(node.input[0])
        elif node.op_type.endswith("SimplifiedLayerNormalization"):
            norms.append(value(node.input[2 if node.op_type.startswith("Skip") else 1]))
        elif node.op_type == "MatMulNBits":
            products.append((value(node.input[1]), value(node.input[2])))
    for place, norm in enumerate(norms[:-1]):
        yield f"blk.{place // 2}.{('attn_norm', 'ffn_norm')[place % 2]}.weight", norm
    yield "output_norm.weight", norms[-1]
    for place, (packed, scales) in enumerate(products[:-1]):
        layer, name = divmod(place, len(_PRODUCTS))
        rows = q4_0(packed, scales)
        if turned := {"attn_q": heads, "attn_k": groups}.get(_PRODUCTS[name]):
            rows = rotated_in_pairs(rows, turned)
        yield f"blk.{layer}.{_PRODUCTS[name]}.weight", rows
    yield "output.weight", q4_0(*products[-1])


def q4_0(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MatMulNBits' weights ``[columns, blocks, 16]`` and scales as rows of ``Q4_0``: of each block a float16 and 16
    bytes, whose lower halves are the block's first 16 weights and whose upper ones are the others."""
    columns, blocks = packed.shape[:2]
    weights = np.stack([packed & 15, packed >> 4], -1).reshape(columns, blocks, 2, _BLOCK // 2)
    halves = weights[:, :, 0] | weights[:, :, 1] << 4
    scale = scales.reshape(columns, blocks, 1).astype(np.float16).view(np.uint8)
    return np.concatenate([scale, halves], -1).reshape(columns, -1)


def rotated_in_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order in which llama.cpp turns them: neighbours, where GroupQueryAttention turns
    the first half of each head with the second."""
    return np.ascontiguousarray(
        rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))
