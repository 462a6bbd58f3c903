"""Convolutions whose input is made by blocks before them: padding, and elementwise work."""

from __future__ import annotations

import numpy as np
from harness import TARGET, Case, SpaceContract, pytest_generate_tests  # noqa: F401 - pytest finds the hook here
from tvm import te, tirx

from mlc.graph.kernels.blocked import conv2d_nchwc
from schedules.cpu.conv import CONV2D
from schedules.space import schedule_with


def _staged(blocks: int, height: int, width: int, out: int, kernel: int, steps: int, stride: int = 1):  # type: ignore[no-untyped-def]
    """``steps`` of scale, shift and activation before a convolution."""

    def build() -> list[te.Tensor]:
        x = te.placeholder((1, blocks, height, width, 16), name="x")
        s, t = (te.placeholder((1, blocks, 1, 1, 16), name=name) for name in "st")
        w = te.placeholder((out, blocks, kernel, kernel, 16, 16), name="w")
        y = te.compute(x.shape, lambda n, c, h, v, i: x[n, c, h, v, i] * s[n, c, 0, 0, i], name="scale")
        z = te.compute(x.shape, lambda n, c, h, v, i: y[n, c, h, v, i] + t[n, c, 0, 0, i], name="shift")
        r = te.compute(x.shape, lambda *i: tirx.max(z(*i), tirx.const(0.0, "float32")), name="relu")
        data = (y, z, r)[steps - 1]
        inputs = [x, s, w] if steps == 1 else [x, s, t, w]
        pads = [kernel // 2] * 4
        return [*inputs, conv2d_nchwc(data, w, (stride, stride), pads, (1, 1), 1)]

    return build


def _convolved(data: np.ndarray, w: np.ndarray, stride: int = 1) -> np.ndarray:
    size = w.shape[2]
    padded = np.pad(data, ((0, 0), (0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    rows, columns = ((d - 1) // stride + 1 for d in data.shape[2:4])
    result = np.zeros((1, w.shape[0], rows, columns, 16))
    for h in range(size):
        for v in range(size):
            part = padded[:, :, h : h + (rows - 1) * stride + 1 : stride, v : v + (columns - 1) * stride + 1 : stride]
            result += np.einsum("nchwi,ocij->nohwj", part, w[:, :, h, v])
    return result


class TestStagedInput(SpaceContract):
    space = CONV2D
    cases = (
        Case("scaled, pointwise", _staged(3, 6, 7, 2, 1, 1), lambda x, s, w: _convolved(x * s, w)),
        Case(
            "normalised and activated, pointwise", _staged(4, 14, 14, 8, 1, 3),
            lambda x, s, t, w: _convolved(np.maximum(x * s + t, 0), w),
        ),
        Case(  # what is padded is the activated tensor: a shift must not reach the border
            "normalised, padded", _staged(2, 9, 8, 4, 3, 2), lambda x, s, t, w: _convolved(x * s + t, w),
        ),
        Case(
            "normalised and activated, padded, strided", _staged(2, 12, 12, 2, 3, 3, stride=2),
            lambda x, s, t, w: _convolved(np.maximum(x * s + t, 0), w, 2),
        ),
    )


def test_the_input_is_made_for_a_chunk_of_rows() -> None:
    """Staged per chunk, the whole activated tensor never exists."""
    func = te.create_prim_func(_staged(4, 14, 14, 8, 1, 3)())
    decisions = {**next(iter(CONV2D.seeds(func, TARGET))), "rows": 2, "oh": 1, "order": 0, "pad": 1}
    text = schedule_with(CONV2D, func, TARGET, decisions).mod["main"].script()
    assert text.count("T.sblock(") >= 3 and text.count('T.sblock("relu")') == 1 and "scale" not in text
    assert text.index("T.parallel") < text.index('T.sblock("relu")')
