"""Products by weights of few bits as functions of their own, whatever the packing of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import te, tirx

from mlc.graph.kernels.weight_only import PANEL, rows_of_word

__all__ = ["columns", "product_func"]


def columns(panels: np.ndarray) -> np.ndarray:
    """``[N/32, R, 32]`` as ``[R, N]``."""
    return panels.transpose(1, 0, 2).reshape(panels.shape[1], -1)


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
