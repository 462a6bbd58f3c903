"""ONNX ``DFT`` and ``STFT`` as products with the transform's matrix, a constant that the compiler packs.

A product takes n^2 steps where a fast transform takes n log n, but at the rate of the best kernels, which at the
lengths of networks (a spectrogram's window, a sequence) is no slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mlc.frontend.onnx_values import array_of, constant_at, dtype_of, input_at

__all__ = ["dft", "stft"]

#: points of the longest transform; its matrix takes up to 2 n by 2 n elements
_LONGEST = 2048


def dft(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``DFT(x, length, axis)`` of ``(.., n, .., 1 or 2)``: the last axis holds the real and the imaginary part.

    ``reshape(reshape(x, (.., n * 2)) @ M, (.., n, 2))``. Raises ``ValueError`` where the length or the axis is not
    constant, and beyond 2048 points.
    """
    from tvm import relax

    x = inputs[0]
    shape = [int(extent) for extent in x.ty.shape]
    length, axis = _scalar(inputs, 1, "dft_length"), _scalar(inputs, 2, "axis")
    if axis is None:  # an attribute before opset 20; the defaults of both forms agree at rank 3 alone
        if "axis" not in attrs and len(shape) > 3:
            raise ValueError("axis must be given")
        axis = int(attrs.get("axis", 1))
    axis %= len(shape)
    inverse, onesided = bool(attrs.get("inverse", 0)), bool(attrs.get("onesided", 0))
    real = inverse and onesided
    points = length or (2 * (shape[axis] - 1) if real else shape[axis])
    matrix = _matrix(shape[axis], points, shape[-1], inverse, onesided)
    order = [i for i in range(len(shape) - 1) if i != axis] + [axis, len(shape) - 1]
    rows = [shape[i] for i in order[:-2]]
    moved = bb.normalize(relax.op.permute_dims(x, order))
    flat = bb.normalize(relax.op.reshape(moved, (prod(rows), shape[axis] * shape[-1])))
    product = bb.normalize(relax.op.matmul(flat, relax.const(matrix.astype(dtype_of(x)))))
    parts = 1 if real else 2
    split = bb.normalize(relax.op.reshape(product, (*rows, matrix.shape[1] // parts, parts)))
    return relax.op.permute_dims(split, [order.index(i) for i in range(len(order))])


def stft(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any]) -> Any:
    """``STFT(signal, step, window, length)`` of real signals ``(batch, n, 1)`` as a convolution whose filters are the
    windowed waves: ``(batch, frames, bins, 2)``.

    Raises ``ValueError`` where the step or the length is not constant, and for complex signals.
    """
    from tvm import relax

    x = inputs[0]
    batch, n, parts = (*(int(extent) for extent in x.ty.shape), 1)[:3]
    if parts != 1:
        raise ValueError("the signal must be real")
    step, length = _scalar(inputs, 1, "frame_step"), _scalar(inputs, 3, "frame_length")
    window = input_at(inputs, 2)
    length = length or (n if window is None else int(window.ty.shape[0]))
    waves = _matrix(length, length, 1, False, bool(attrs.get("onesided", 1)))
    known = array_of(window)
    if known is not None:
        waves = waves * known[:, None]
    filters = relax.const(np.ascontiguousarray(waves.T[:, None]).astype(dtype_of(x)))
    if window is not None and known is None:
        filters = bb.normalize(relax.op.multiply(filters, window))
    signal = bb.normalize(relax.op.reshape(x, (batch, 1, n)))
    waved = bb.normalize(relax.op.nn.conv1d(signal, filters, strides=step))
    frames = int(waved.ty.shape[2])
    split = bb.normalize(relax.op.reshape(waved, (batch, waves.shape[1] // 2, 2, frames)))
    return relax.op.permute_dims(split, [0, 3, 1, 2])


def _matrix(given: int, points: int, parts: int, inverse: bool, onesided: bool) -> np.ndarray:
    """The matrix of a transform over ``points``, of ``given`` numbers with ``parts`` each: a row for each input."""
    if max(given, points) > _LONGEST:
        raise ValueError(f"a transform must have at most {_LONGEST} points, got {max(given, points)}")
    units = np.eye(given * parts).reshape(given * parts, given, parts)
    numbers = units[..., 0] if parts == 1 else units[..., 0] + 1j * units[..., 1]
    if onesided and inverse:
        return np.asarray(np.fft.irfft(numbers, points))
    if onesided and parts != 1:
        raise ValueError("a one-sided transform must have a real signal")
    transform = np.fft.ifft if inverse else np.fft.rfft if onesided else np.fft.fft
    waves = transform(numbers, points)
    return np.stack([waves.real, waves.imag], -1).reshape(given * parts, -1)


def _scalar(inputs: Sequence[Any], position: int, name: str) -> int | None:
    found = constant_at(inputs, position, name)
    return None if found is None else int(found.item())
