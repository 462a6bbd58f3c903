"""Transposed convolution in blocked layouts, without the zeros that its definition puts between the inputs.

Outputs whose row and column leave the same remainders by the strides, a *phase*, see the same elements of the kernel:
every stride-th one. Each phase is an ordinary convolution at stride 1 with that part of the kernel, and the phases'
results interleave. After Shi et al., "Is the deconvolution layer the same as a convolutional layer?" (2016). Kernels
are taken apart when the module is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import te, tirx

from mlc.graph.kernels.blocked import pad_spatial
from mlc.graph.kernels.integer import widened

__all__ = ["Axis", "axes", "conv2d_transpose_nchwc", "phase_weight"]


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a transposed convolution: ``size`` inputs, ``before`` and ``after`` cut off its result,
    ``extra`` added to its end."""

    size: int
    kernel: int
    stride: int
    before: int
    after: int
    extra: int

    @property
    def out(self) -> int:
        """Outputs."""
        return (self.size - 1) * self.stride + self.kernel - self.before - self.after + self.extra

    @property
    def taps(self) -> int:
        """Elements of the kernel that an output sees, at most."""
        return -(-self.kernel // self.stride)

    @property
    def steps(self) -> int:
        """Outputs of a phase, at most."""
        return -(-self.out // self.stride)

    @property
    def padding(self) -> tuple[int, int]:
        """Zeros before and after the inputs, so that every phase finds whatever it reads."""
        last = self.steps - 1 + (self.stride - 1 + self.before) // self.stride
        return max(0, self.taps - 1 - self.before // self.stride), max(0, last + 1 - self.size)

    def start(self, phase: int | tirx.Expr) -> int | tirx.Expr:
        """Where, among the padded inputs, a phase's first output begins to read."""
        shift = self.padding[0] - (self.taps - 1)
        if isinstance(phase, int):
            return (phase + self.before) // self.stride + shift
        return tirx.floordiv(phase + self.before, self.stride) + shift

    def part(self, phase: int) -> slice:
        """The elements of the kernel that a phase sees, the last input's first."""
        return slice((phase + self.before) % self.stride, None, self.stride)


def axes(
    size: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], extra: Sequence[int]
) -> tuple[Axis, Axis]:
    """Rows and columns of a transposed convolution; ``pads`` is ``(top, left, bottom, right)``.

    A single input has no neighbour, so its stride may as well be the kernel's size: each output then is a product with
    one element of the kernel instead of many with zeros.
    """
    strides = [max(stride, k) if count == 1 else stride for count, k, stride in zip(size, kernel, strides, strict=True)]
    rows, columns = (Axis(size[i], kernel[i], strides[i], pads[i], pads[i + 2], extra[i]) for i in (0, 1))
    return rows, columns


def phase_weight(weight: np.ndarray, rows: Axis, columns: Axis, groups: int) -> np.ndarray:
    """``[IC, OC/groups, KH, KW] -> [SH * SW, OC, IC/groups, TH, TW]``: each phase's kernel.

    Elements lie in the order of the inputs that they meet. Phases that see fewer have zeros before theirs.
    """
    ic, oc, *kernel = weight.shape
    cut = weight.reshape(groups, ic // groups, oc, *kernel).swapaxes(1, 2).reshape(-1, ic // groups, *kernel)
    phases = np.zeros((rows.stride, columns.stride, *cut.shape[:2], rows.taps, columns.taps), weight.dtype)
    for row, column in np.ndindex(rows.stride, columns.stride):
        taps = cut[:, :, rows.part(row), columns.part(column)][:, :, ::-1, ::-1]
        phases[row, column, :, :, rows.taps - taps.shape[2] :, columns.taps - taps.shape[3] :] = taps
    return phases.reshape(-1, *phases.shape[2:])


def conv2d_transpose_nchwc(data: te.Tensor, weight: te.Tensor, rows: Axis, columns: Axis, groups: int) -> te.Tensor:
    """Transposed convolution ``[N, IC/i, H, W, i] -> [N, OC/o, OH, OW, o]``, with ``OH`` and ``OW`` rounded up to
    whole phases: rows and columns past :attr:`Axis.out` hold what further outputs would be.

    ``weight`` is ``[SH * SW * OC/o, IC/groups/i, TH, TW, i, o]``, :func:`phase_weight` cut into blocks, or of integers
    those blocks as :func:`mlc.graph.kernels.integer.pack_conv` packs them; then data are uint8 and sums int32. With
    groups, a group's channels fill whole blocks on both sides.
    """
    above, below = rows.padding
    before, after = columns.padding
    padded = pad_spatial(data, (above, before, below, after))
    blocks, ic_blocks, th, tw = weight.shape[:4]
    if str(data.dtype) == "uint8":
        *_, steps, oc, size = weight.shape
        padded, op = widened(padded, weight), "conv2d_phases_integer"
        inner = [te.reduce_axis((0, steps), name="rq"), te.reduce_axis((0, size), name="re")]
    else:
        *_, ic, oc = weight.shape
        op, inner = "conv2d_phases", [te.reduce_axis((0, ic), name="rc")]
    sh, sw = rows.stride, columns.stride
    oc_blocks = blocks // (sh * sw)
    per_group = oc_blocks // groups
    rb, rh = te.reduce_axis((0, ic_blocks), name="rb"), te.reduce_axis((0, th), name="rh")
    rw = te.reduce_axis((0, tw), name="rw")

    def product(ni, pi, qi, bi, hi, wi, ci):  # type: ignore[no-untyped-def]
        channel = rb if groups == 1 else (bi // per_group) * ic_blocks + rb
        pixel = (ni, channel, hi + rh + rows.start(pi), wi + rw + columns.start(qi))
        block = ((pi * sw + qi) * oc_blocks + bi, rb, rh, rw)
        if len(inner) > 1:
            step, each = inner
            left, right = padded[(*pixel, step * size + each)], weight[(*block, step, ci, each)]
            factors = left.astype("int32") * right.astype("int32")
        else:
            factors = padded[(*pixel, inner[0])] * weight[(*block, inner[0], ci)]
        return te.sum(factors, axis=[rb, rh, rw, *inner])

    shape = (data.shape[0], sh, sw, oc_blocks, rows.steps, columns.steps, oc)
    phases = te.compute(shape, product, name="conv2d_phases", attrs={"mlc.op": op})

    def interleaved(ni, bi, hi, wi, ci):  # type: ignore[no-untyped-def]
        row, column = tirx.floormod(hi, sh), tirx.floormod(wi, sw)
        return phases[ni, row, column, bi, tirx.floordiv(hi, sh), tirx.floordiv(wi, sw), ci]

    size = (data.shape[0], oc_blocks, rows.steps * sh, columns.steps * sw, oc)
    return te.compute(size, interleaved, name="conv2d_transpose")
