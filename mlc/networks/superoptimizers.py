"""The benchmark networks of published graph superoptimizers, in their papers' sizes, with seeded random weights.

Tensat's seven (Yang et al., "Equality Saturation for Tensor Graph Superoptimization", 2021), most of which were TASO's
before, and PET's CSRNet and ResNet3D-18 (Wang et al., 2021). Batch normalisations are folded, as in files for
inference; weights of a recurrent cell are those of all its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mlc.networks.models import model_named
from mlc.networks.writer import GraphWriter

if TYPE_CHECKING:
    import onnx

__all__ = ["SUPEROPTIMIZER_MODELS", "csrnet", "inception_v3", "nas_rnn", "nasnet_a", "resnet3d_18", "resnext50"]


def nas_rnn(steps: int = 5, hidden: int = 512) -> onnx.ModelProto:
    """The recurrent cell that a search found, over ``steps`` inputs (Zoph and Le, "Neural Architecture Search with
    Reinforcement Learning", 2017, figure 8, without its memory cell, as superoptimizers take it): eight pairs of
    products a step."""
    w = GraphWriter("nas_rnn")
    pairs = [(w.weight(hidden, hidden, fan_in=hidden), w.weight(hidden, hidden, fan_in=hidden)) for _ in range(8)]
    h = "h0"
    for step in range(steps):
        sums = [w.node("Add", w.node("MatMul", f"x{step}", a), w.node("MatMul", h, b)) for a, b in pairs]
        leaves = [w.node(op, value) for op, value in zip(
            ("Relu", "Sigmoid", "Tanh", "Sigmoid", "Sigmoid", "Tanh", "Sigmoid", "Relu"), sums, strict=True)]
        inner = [w.node("Add", leaves[0], leaves[3]), w.node("Add", leaves[1], leaves[2]),
                 w.node("Mul", leaves[4], leaves[5]), w.node("Mul", leaves[6], leaves[7])]
        left = w.node("Add", w.node("Sigmoid", inner[1]), w.node("Tanh", inner[2]))
        right = w.node("Mul", w.node("Tanh", inner[0]), w.node("Tanh", inner[3]))
        h = w.node("Tanh", w.node("Mul", w.node("Tanh", left), w.node("Tanh", right)))
    shape = (1, hidden)
    return w.model({**{f"x{step}": shape for step in range(steps)}, "h0": shape}, {h: shape})


def nasnet_a(size: int = 224, filters: int = 44, repeats: int = 4) -> onnx.ModelProto:
    """NASNet-A 4 @ 1056 but for its stem's cells (Zoph et al., "Learning Transferable Architectures for Scalable Image
    Recognition", 2018): f32 ``x`` of ``(1, 3, size, size)`` to ``(1, 1000)``."""
    return _NasNet(size, filters).network(repeats)


class _NasNet:
    """NASNet-A's cells; ``width`` is what each of a cell's results has."""

    def __init__(self, size: int, filters: int) -> None:
        self._w, self._size, self._width = GraphWriter("nasnet_a"), size, filters

    def network(self, repeats: int) -> onnx.ModelProto:
        w = self._w
        x = w.conv("x", 3, 32, 3, stride=2)
        previous, now = (x, 32, 1), (x, 32, 1)  # a result, its channels, how much smaller than the stem's it is
        for stage in range(3):
            for cell in range(repeats + (stage > 0)):
                reduces = stage > 0 and not cell
                self._width *= 2 if reduces else 1
                previous, now = now, self._cell(previous, now, reduces)
        rows = w.node("Flatten", w.node("GlobalAveragePool", w.node("Relu", now[0])), axis=1)
        return w.model({"x": (1, 3, self._size, self._size)}, {w.dense(rows, now[1], 1000): (1, 1000)})

    def _cell(self, before: tuple[str, int, int], now: tuple[str, int, int], reduces: bool) -> tuple[str, int, int]:
        h, p = self._fitted(now, now[2]), self._fitted(before, now[2])
        stride = 2 if reduces else 1
        parts = self._reducing(h, p) if reduces else self._normal(h, p)
        return self._w.node("Concat", *parts, axis=1), len(parts) * self._width, now[2] * stride

    def _fitted(self, given: tuple[str, int, int], scale: int) -> str:
        """A result with the cell's channels, at its scale."""
        name, channels, at = given
        return self._w.conv(self._w.node("Relu", name), channels, self._width, stride=scale // at, relu=False)

    def _separable(self, x: str, kernel: int, stride: int = 1) -> str:
        for step in (stride, 1):
            spatial = self._w.conv(self._w.node("Relu", x), self._width, self._width, kernel, step, self._width,
                                   relu=False)
            x = self._w.conv(spatial, self._width, self._width, relu=False, gain=1.0)
        return x

    def _normal(self, h: str, p: str) -> Sequence[str]:
        add, average = self._add, lambda x: self._w.pool("AveragePool", x)
        return (p, add(self._separable(h, 3), h), add(self._separable(p, 3), self._separable(h, 5)),
                add(average(h), p), add(average(p), average(p)), add(self._separable(p, 5), self._separable(p, 3)))

    def _reducing(self, h: str, p: str) -> Sequence[str]:
        w = self._w
        first = self._add(self._separable(h, 5, 2), self._separable(p, 7, 2))
        second = self._add(w.pool("MaxPool", h, 3, 2), self._separable(p, 7, 2))
        third = self._add(w.pool("AveragePool", h, 3, 2), self._separable(p, 5, 2))
        return (second, third, self._add(w.pool("AveragePool", first), second),
                self._add(w.pool("MaxPool", h, 3, 2), self._separable(first, 3)))

    def _add(self, a: str, b: str) -> str:
        return self._w.node("Add", a, b)


def resnext50(size: int = 224, groups: int = 32) -> onnx.ModelProto:
    """ResNeXt-50 (32x4d) (Xie et al., 2017): f32 ``x`` of ``(1, 3, size, size)`` to ``(1, 1000)``."""
    w = GraphWriter("resnext50")
    x, channels = w.pool("MaxPool", w.conv("x", 3, 64, 7, stride=2), 3, 2), 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 128 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            inner = w.conv(w.conv(x, channels, width), width, width, 3, stride, groups)
            branch = w.conv(inner, width, 2 * width, relu=False, gain=0.5)
            trunk = x if block else w.conv(x, channels, 2 * width, 1, stride, relu=False, gain=1.0)
            x, channels = w.node("Relu", w.node("Add", branch, trunk)), 2 * width
    return _classified(w, x, channels, (1, 3, size, size))


def _classified(w: GraphWriter, x: str, channels: int, shape: Sequence[int]) -> onnx.ModelProto:
    rows = w.node("Flatten", w.node("GlobalAveragePool", x), axis=1)
    return w.model({"x": shape}, {w.dense(rows, channels, 1000): (1, 1000)})


def inception_v3(size: int = 299) -> onnx.ModelProto:
    """Inception v3 (Szegedy et al., "Rethinking the Inception Architecture", 2016): f32 ``x`` of ``(1, 3, size, size)``
    to ``(1, 1000)``."""
    w = GraphWriter("inception_v3")

    def chain(x: str, channels: int, *steps: tuple[int, int | Sequence[int]]) -> str:
        """Convolutions to so many channels with such windows, one after the other."""
        for width, kernel in steps:
            x, channels = w.conv(x, channels, width, kernel), width
        return x

    def halved(x: str, channels: int, width: int) -> str:
        return w.conv(x, channels, width, 3, stride=2, padded=False)

    def joined(*parts: str) -> str:
        return w.node("Concat", *parts, axis=1)

    def pooled(x: str, channels: int, width: int) -> str:
        return w.conv(w.pool("AveragePool", x), channels, width)

    x = w.conv(w.conv(halved("x", 3, 32), 32, 32, 3, padded=False), 32, 64, 3)
    x = w.conv(w.conv(w.pool("MaxPool", x, 3, 2, padded=False), 64, 80), 80, 192, 3, padded=False)
    x, channels = w.pool("MaxPool", x, 3, 2, padded=False), 192
    for width in (32, 64, 64):
        x = joined(chain(x, channels, (64, 1)), chain(x, channels, (48, 1), (64, 5)),
                   chain(x, channels, (64, 1), (96, 3), (96, 3)), pooled(x, channels, width))
        channels = 224 + width
    x = joined(halved(x, channels, 384), halved(chain(x, channels, (64, 1), (96, 3)), 96, 96),
               w.pool("MaxPool", x, 3, 2, padded=False))
    channels, across, along = 768, (1, 7), (7, 1)
    for width in (128, 160, 160, 192):
        x = joined(chain(x, channels, (192, 1)), chain(x, channels, (width, 1), (width, across), (192, along)),
                   chain(x, channels, (width, 1), (width, along), (width, across), (width, along), (192, across)),
                   pooled(x, channels, 192))
    x = joined(halved(chain(x, channels, (192, 1)), 192, 320),
               halved(chain(x, channels, (192, 1), (192, across), (192, along)), 192, 192),
               w.pool("MaxPool", x, 3, 2, padded=False))
    channels = 1280
    for _ in range(2):
        near, far = chain(x, channels, (384, 1)), chain(x, channels, (448, 1), (384, 3))
        ends = [chain(part, 384, (384, window)) for part in (near, far) for window in ((1, 3), (3, 1))]
        x, channels = joined(chain(x, channels, (320, 1)), *ends, pooled(x, channels, 192)), 2048
    return _classified(w, x, channels, (1, 3, size, size))


def csrnet(size: int = 224) -> onnx.ModelProto:
    """CSRNet B (Li et al., 2018): VGG-16's first ten convolutions and six dilated by 2; f32 ``x`` of
    ``(1, 3, size, size)`` to ``(1, 1, size/8, size/8)``."""
    w = GraphWriter("csrnet")
    x, channels = "x", 3
    for stage, (width, layers) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3))):
        x = w.node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]) if stage else x
        for _ in range(layers):
            x, channels = w.conv(x, channels, width, 3), width
    for width in (512, 512, 512, 256, 128, 64):
        x, channels = w.conv(x, channels, width, 3, dilation=2), width
    x = w.conv(x, channels, 1, relu=False, gain=1.0)
    return w.model({"x": (1, 3, size, size)}, {x: (1, 1, size // 8, size // 8)})


def resnet3d_18(frames: int = 16, size: int = 112) -> onnx.ModelProto:
    """R3D-18 (Tran et al., "A Closer Look at Spatiotemporal Convolutions", 2018): f32 ``x`` of
    ``(1, 3, frames, size, size)`` to ``(1, 1000)``."""
    w = GraphWriter("resnet3d_18")
    x, channels = w.conv("x", 3, 64, (3, 7, 7), (1, 2, 2)), 64
    for stage in range(4):
        width = 64 << stage
        for block in range(2):
            stride = 2 if stage and not block else 1
            inner = w.conv(x, channels, width, (3, 3, 3), stride)
            branch = w.conv(inner, width, width, (3, 3, 3), relu=False, gain=0.5)
            trunk = x if channels == width else w.conv(x, channels, width, (1, 1, 1), stride, relu=False, gain=1.0)
            x, channels = w.node("Relu", w.node("Add", branch, trunk)), width
    return _classified(w, x, channels, (1, 3, frames, size, size))


#: by the names of the papers' tables
SUPEROPTIMIZER_MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "bert": lambda: model_named("bert_base"),
    "nas_rnn": nas_rnn,
    "nasnet_a": nasnet_a,
    "resnext50": resnext50,
    "inception_v3": inception_v3,
    "squeezenet": lambda: model_named("squeezenet"),
    "vgg19": lambda: model_named("vgg19"),
    "csrnet": csrnet,
    "resnet3d_18": resnet3d_18,
}
