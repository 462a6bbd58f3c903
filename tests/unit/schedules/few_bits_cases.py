"""Products by weights of few bits as functions of their own, whatever the packing of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import te, tirx

from mlc.graph.kernels.rounded import half_range
from mlc.graph.kernels.weight_only import PANEL, rows_of_word

__all__ = ["columns", "product_func", "unpacked_bytes"]


def columns(panels: np.ndarray) -> np.ndarray:
    """``[N/32, R, 32]`` as ``[R, N]``."""
    return panels.transpose(1, 0, 2).reshape(panels.shape[1], -1)


def unpacked_bytes(packed: np.ndarray, bits: int) -> np.ndarray:
    """``[N/32, R, 32, 4]`` bytes as ``[K, N]`` integers around 0, by arithmetic that shares nothing with the
    packing's."""
    panels, steps, lanes, four = packed.shape
    each, wide = rows_of_word(bits), packed.astype(np.int64)
    found = np.zeros((steps * each, panels * lanes), np.int64)
    for k in range(each):
        byte = wide[:, :, :, k % four]
        found[k::each] = (byte // 16 ** (k // four) % (1 << bits) - half_range(bits)).transpose(1, 0, 2).reshape(
            steps, -1)
    return found


def product_func(
    product: Callable[..., te.Tensor], packed: str, word: Sequence[int], bits: int, block: int, rows: tuple[int, ...],
    k: int, n: int, zero: bool, bias: bool,
) -> tirx.PrimFunc:
    """``[*rows, k] x [k, n]`` by ``product``, with a bias and a ReLU after it if ``bias``.

    Words of weights have the shape ``word`` and the type ``packed``. Parameters: activations, words, scales, zero
    points if ``zero``, the bias.
    """
    panels, blocks = -(-n // PANEL), -(-k // block)
    steps = blocks * -(-min(k, block) // rows_of_word(bits))
    inputs = [te.placeholder((*rows, k), "float32", name="x"),
              te.placeholder((panels, steps, PANEL, *word), packed, name="words")]
    for name in ("scale", *(["zero"] if zero else [])):
        inputs.append(te.placeholder((panels, blocks, PANEL), "float32", name=name))
    result = product(*inputs[:3], inputs[3] if zero else None, bits, block)
    if not bias:
        return te.create_prim_func([*inputs, result])
    added = te.placeholder((panels * PANEL,), "float32", name="bias")
    zeros = tirx.const(0.0, "float32")
    relu = te.compute(result.shape, lambda *i: te.max(result[i] + added[i[-1]], zeros), name="relu")
    return te.create_prim_func([*inputs, added, relu])
