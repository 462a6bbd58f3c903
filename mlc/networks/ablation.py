"""Networks with many opportunities for substitutions: parallel branches, groups, shared operands, unrolled steps.

Each is an ``onnx.ModelProto`` with seeded random weights, of the sizes that such networks have, written so that
products which could be one product are several, as model files have them. Those of :data:`WRITTEN_MODELS` and
:data:`PUBLISHED_MODELS` are in the form in which they are trained or in which their authors write them, which is not
the form in which they should run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.networks.models import Network, model_named
from mlc.networks.writer import GraphWriter

if TYPE_CHECKING:
    import onnx

__all__ = ["ABLATION_MODELS", "PUBLISHED_MODELS", "WRITTEN_MODELS", "ablation_model", "bert_qkv", "inception_like",
           "lora_bert", "nasnet_like", "repvgg_training", "resnext_branches", "resnext_like", "rnn_unrolled"]

def inception_like(size: int = 28) -> onnx.ModelProto:
    """Four modules of parallel 1x1, 3x3, 5x5 and pooling branches (Szegedy et al., 2015), 192 channels in."""
    w = GraphWriter("inception_like")
    x, channels = "x", 192
    for module, (a, b1, b, c1, c, d) in enumerate([(64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64),
                                                   (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64)]):
        if module == 2:
            x, size = w.pool("MaxPool", x, 3, 2), (size + 1) // 2
        branches = [w.conv(x, channels, a), w.conv(w.conv(x, channels, b1), b1, b, 3),
                    w.conv(w.conv(x, channels, c1), c1, c, 5), w.conv(w.pool("MaxPool", x), channels, d)]
        x, channels = w.node("Concat", *branches, axis=1), a + b + c + d
    return w.model({"x": (1, 192, 28, 28)}, {x: (1, channels, size, size)})


def resnext_like(size: int = 56, groups: int = 32) -> onnx.ModelProto:
    """Two bottleneck blocks in each of three stages, their 3x3 convolutions in 32 groups (Xie et al., 2017)."""
    w = GraphWriter("resnext_like")
    x, channels = "x", 64
    for stage, width in enumerate((128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            inner = w.conv(w.conv(x, channels, width), width, width, 3, stride, groups)
            branch = w.conv(inner, width, 2 * width, relu=False, gain=0.5)
            trunk = w.conv(x, channels, 2 * width, 1, stride, relu=False, gain=1.0) if not block else x
            x, channels = w.node("Relu", w.node("Add", branch, trunk)), 2 * width
    return w.model({"x": (1, 64, size, size)}, {x: (1, channels, size // 4, size // 4)})


def bert_qkv(layers: int = 3, seq: int = 128, hidden: int = 512, heads: int = 8) -> onnx.ModelProto:
    """Encoder layers with three separate products for queries, keys and values (Devlin et al., 2019)."""
    w = GraphWriter("bert_qkv")
    return _encoder(w, w.dense, layers, seq, hidden, heads)


def lora_bert(layers: int = 3, seq: int = 128, hidden: int = 512, heads: int = 8, rank: int = 8) -> onnx.ModelProto:
    """The encoder layers of :func:`bert_qkv` with adapters of a low rank beside the products of their attention, not
    merged with them (Hu et al., "LoRA", 2022)."""
    w = GraphWriter("lora_bert")
    scale = w.constant(np.array(2.0, dtype=np.float32))

    def project(x: str, inputs: int, outputs: int) -> str:
        low = w.node("MatMul", x, w.weight(inputs, rank, fan_in=inputs))
        high = w.node("MatMul", low, w.weight(rank, outputs, fan_in=rank, gain=0.01))
        return w.node("Add", w.dense(x, inputs, outputs), w.node("Mul", high, scale))

    return _encoder(w, project, layers, seq, hidden, heads)


def _encoder(w: GraphWriter, project: Callable[[str, int, int], str], layers: int, seq: int, hidden: int,
             heads: int) -> onnx.ModelProto:
    """Encoder layers; ``project`` writes the products of attention with what is added to them."""
    x, depth = "x", hidden // heads
    split, merged = w.constant(np.array([1, seq, heads, depth])), w.constant(np.array([1, seq, hidden]))
    scale, one, half, root = (w.constant(np.array(v, dtype=np.float32)) for v in (depth**-0.5, 1.0, 0.5, 2**0.5))

    def norm(value: str) -> str:
        factor = w.constant(w.rng.uniform(0.8, 1.2, hidden).astype(np.float32))
        return w.node("LayerNormalization", value, factor, w.bias(hidden), axis=-1, epsilon=1e-5)

    for _ in range(layers):
        q, k, v = (w.node("Reshape", project(x, hidden, hidden), split) for _ in range(3))
        keys = w.node("Transpose", k, perm=[0, 2, 3, 1])
        scores = w.node("Mul", w.node("MatMul", w.node("Transpose", q, perm=[0, 2, 1, 3]), keys), scale)
        mixed = w.node("MatMul", w.node("Softmax", scores, axis=-1), w.node("Transpose", v, perm=[0, 2, 1, 3]))
        rows = w.node("Reshape", w.node("Transpose", mixed, perm=[0, 2, 1, 3]), merged)
        x = norm(w.node("Add", x, project(rows, hidden, hidden)))
        inner = w.dense(x, hidden, 4 * hidden)
        tail = w.node("Add", w.node("Erf", w.node("Div", inner, root)), one)
        active = w.node("Mul", w.node("Mul", inner, half), tail)
        x = norm(w.node("Add", x, w.dense(active, 4 * hidden, hidden)))
    return w.model({"x": (1, seq, hidden)}, {x: (1, seq, hidden)})


def repvgg_training(size: int = 56, widths: Sequence[int] = (48, 96, 192)) -> onnx.ModelProto:
    """Blocks as they are trained: a 3x3 and a 1x1 convolution and the image itself, each with a batch normalisation of
    its own, summed (Ding et al., "RepVGG", 2021; the first widths are those of A0)."""
    w = GraphWriter("repvgg_training")
    x, channels, extent = "x", widths[0], size
    for stage, width in enumerate(widths):
        for block in range(2):
            stride = 2 if stage and not block else 1
            extent = (extent + stride - 1) // stride
            parts = [w.normalised(w.conv(x, channels, width, kernel, stride, relu=False, bias=False, gain=1.0), width)
                     for kernel in (3, 1)]
            if stride == 1:
                parts.append(w.normalised(x, width))
            total = parts[0]
            for part in parts[1:]:
                total = w.node("Add", total, part)
            x, channels = w.node("Relu", total), width
    return w.model({"x": (1, widths[0], size, size)}, {x: (1, channels, extent, extent)})


def resnext_branches(size: int = 28, channels: int = 256, branches: int = 32, width: int = 4,
                     blocks: int = 2) -> onnx.ModelProto:
    """Bottleneck blocks of many branches that are summed, which is form (a) of Xie et al. (2017); form (c) of the same
    is a convolution in groups."""
    w = GraphWriter("resnext_branches")
    x = "x"
    for _ in range(blocks):
        total = x
        for _ in range(branches):
            inner = w.conv(w.conv(x, channels, width), width, width, 3)
            total = w.node("Add", total, w.conv(inner, width, channels, relu=False, gain=1.0 / branches))
        x = w.node("Relu", total)
    return w.model({"x": (1, channels, size, size)}, {x: (1, channels, size, size)})


def nasnet_like(size: int = 28, channels: int = 88, cells: int = 3) -> onnx.ModelProto:
    """Cells of separable convolutions, average pools and sums of branches (NASNet-A's, Zoph et al., 2018)."""
    w = GraphWriter("nasnet_like")

    def separable(x: str, kernel: int) -> str:
        for _ in range(2):
            spatial = w.conv(w.node("Relu", x), channels, channels, kernel, groups=channels, relu=False)
            x = w.conv(spatial, channels, channels, relu=False, gain=1.0)
        return x

    previous, x, width, before = "x", "x", channels, channels
    for _ in range(cells):
        h = w.conv(w.node("Relu", x), width, channels, relu=False)
        p = w.conv(w.node("Relu", previous), before, channels, relu=False)
        parts = [
            w.node("Add", separable(h, 3), h),
            w.node("Add", separable(p, 3), separable(h, 5)),
            w.node("Add", w.pool("AveragePool", h), p),
            w.node("Add", w.pool("AveragePool", p), w.pool("AveragePool", p)),
            w.node("Add", separable(p, 5), separable(p, 3)),
        ]
        previous, before = x, width
        x, width = w.node("Concat", p, *parts, axis=1), 6 * channels
    return w.model({"x": (1, channels, size, size)}, {x: (1, width, size, size)})


def rnn_unrolled(steps: int = 6, hidden: int = 512, batch: int = 1) -> onnx.ModelProto:
    """An LSTM cell over ``steps`` inputs: eight products a step, two for every gate (Hochreiter and Schmidhuber)."""
    w = GraphWriter("rnn_unrolled")
    gates = {gate: (w.weight(hidden, hidden, fan_in=hidden), w.weight(hidden, hidden, fan_in=hidden), w.bias(hidden))
             for gate in ("input", "forget", "output", "cell")}
    h, c = "h0", "c0"
    for step in range(steps):
        opened = {}
        for gate, (from_x, from_h, bias) in gates.items():
            total = w.node("Add", w.node("MatMul", f"x{step}", from_x), w.node("MatMul", h, from_h))
            opened[gate] = w.node("Tanh" if gate == "cell" else "Sigmoid", w.node("Add", total, bias))
        kept, new = w.node("Mul", opened["forget"], c), w.node("Mul", opened["input"], opened["cell"])
        c = w.node("Add", kept, new)
        h = w.node("Mul", opened["output"], w.node("Tanh", c))
    shape = (batch, hidden)
    return w.model({**{f"x{step}": shape for step in range(steps)}, "h0": shape, "c0": shape}, {h: shape, c: shape})


#: the six models of the ablation table
ABLATION_MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "inception_like": inception_like,
    "resnext_like": resnext_like,
    "squeezenet": lambda: model_named("squeezenet"),
    "bert_qkv": bert_qkv,
    "nasnet_like": nasnet_like,
    "rnn_unrolled": rnn_unrolled,
}


#: three more, in the form in which they are trained or written
WRITTEN_MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "repvgg_training": repvgg_training,
    "lora_bert": lora_bert,
    "resnext_branches": resnext_branches,
}


def _published(name: str, **inputs: tuple[int, ...]) -> Callable[[], onnx.ModelProto]:
    """A class of :mod:`mlc.networks.written`, exported by PyTorch; weights are drawn so that signals keep their
    magnitude."""

    def build() -> Any:
        from torch import nn

        from mlc.networks import written

        module = getattr(written, name)()
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
                nn.init.kaiming_normal_(layer.weight)
        return module

    return lambda: Network(build, inputs).onnx()


#: architectures as their authors publish them, of which a search makes something faster
PUBLISHED_MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "rnn_unrolled": rnn_unrolled,
    **WRITTEN_MODELS,
    "acnet_training": _published("ACNet", x=(1, 64, 56, 56)),
    "conditional_neural_process": _published("ConditionalNeuralProcess", context=(1, 128, 2), targets=(1, 400, 1)),
    "pointnet_segmentation": _published("PointNetSegmentation", points=(1, 3, 2048)),
    "deep_sdf": _published("DeepSDF", code=(1, 256), places=(2048, 3)),
    "folding_net": _published("FoldingNet", code=(1, 512), grid=(2025, 2)),
    "non_local_block": _published("NonLocalBlock", x=(1, 512, 4, 28, 28)),
    "graph_sage": _published("GraphSAGE", x=(2708, 1433), adjacency=(2708, 2708)),
}


def ablation_model(name: str) -> onnx.ModelProto:
    """A model of any of the tables by its name; raises ``KeyError`` with the names for any other."""
    models = {**ABLATION_MODELS, **WRITTEN_MODELS, **PUBLISHED_MODELS}
    if name not in models:
        raise KeyError(f"the name must be one of {', '.join(models)}, got {name!r}")
    return models[name]()
