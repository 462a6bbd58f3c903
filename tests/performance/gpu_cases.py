"""What GPUs are timed with: products, other kernels and whole models, each as ONNX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

    from mlc.networks.models import Network

__all__ = ["Case", "cases"]

#: rows, columns and terms of products: squares, BERT's, LLaMA's, and one or sixteen rows
PRODUCTS = (
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (2048, 768, 768),
    (2048, 3072, 768), (2048, 768, 3072), (2048, 11008, 4096), (1, 4096, 4096), (16, 4096, 4096),
)
#: rows and columns of softmax and layer normalisation
ROWS = ((8192, 1024), (2048, 768), (2048, 4096), (512, 32000))
#: batch, heads, queries, keys and head size, causal or not
ATTENTIONS = ((4, 16, 2048, 2048, 128, 0), (4, 16, 2048, 2048, 128, 1), (1, 12, 128, 128, 64, 0),
              (1, 32, 1, 4096, 128, 0))
#: batch, channels, size, filters, window and stride: ResNet-50's
CONVOLUTIONS = (
    (32, 3, 224, 64, 7, 2), (32, 64, 56, 64, 3, 1), (32, 256, 56, 128, 1, 1), (32, 128, 28, 128, 3, 1),
    (32, 256, 14, 256, 3, 1), (32, 1024, 14, 2048, 1, 2), (32, 512, 7, 512, 3, 1), (1, 256, 14, 256, 3, 1),
)
#: rows, columns and terms of products with weights of 4 bits in blocks of 32: LLaMA's, decoding and prefilling
FEW_BITS = tuple((m, n, 4096) for n in (4096, 11008) for m in (1, 16, 512))
#: types of products, and the architecture, that are timed on ``mma.sync`` whatever the GPU has beside it
_BY_MMA = (("bfloat16", "sm_80"), ("float16", "sm_80"))
#: models and their batches, in float16
MODELS = (("resnet50", 1), ("resnet50", 32), ("bert_base", 1), ("bert_base", 16), ("gpt2_small", 1))
#: numbers of packed weights that have a scale
_BLOCK = 32
#: rows of a product that memory bounds
_FEW = 16


@dataclass(frozen=True)
class Case:
    """A model to build: a node of ``kind`` in ``dtype`` and of ``shape``, whose numbers are those of :data:`PRODUCTS`,
    :data:`ROWS` and so on; without a shape one of :data:`MODELS`, whose name is the ``kind``, for so many at a time.

    ``arch`` is an architecture other than the target's whose kernels it has. ``peer`` is whom it is timed beside in
    PyTorch's place: ``dlight``, or ``metaschedule`` after ``tuning`` seconds of both."""

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] | None = None
    kind: str = "product"
    batch: int = 1
    arch: str = ""
    peer: str = ""
    tuning: float = 0.0

    def beside(self, peer: str, tuning: float = 0.0) -> Case:
        """The same with another peer."""
        return replace(self, name=f"{self.name}-{peer}{f'-{tuning:g}' if tuning else ''}", peer=peer, tuning=tuning)

    def artifact(self, folder: Path) -> Path:
        """What mlc makes of it: where nothing is tuned, one for all peers."""
        return folder / f"{self.name if self.tuning else self.name.removesuffix(f'-{self.peer}')}.so"

    def others(self, folder: Path) -> Path:
        """What the peer makes of it."""
        return folder / f"{self.name}.tvm.so"

    @property
    def precision(self) -> str:
        """What operands of a model's products are rounded to."""
        return {"float16": "f16", "bfloat16": "bf16"}.get(self.dtype, "f32") if self.shape is None else "f32"

    def network(self, fused: bool = False) -> Network:
        """A whole model, as PyTorch has it; ``fused`` with its own attention."""
        from mlc.networks.architectures import TRANSFORMERS_ARCHITECTURES
        from mlc.networks.models import network

        found = network(self.kind, self.batch, fused)
        return found if found is not None else TRANSFORMERS_ARCHITECTURES[self.kind].batched(self.batch)

    def model(self, dtype: str = "") -> onnx.ModelProto:
        """The case as ONNX; a kernel in another type on demand."""
        from onnx import TensorProto, helper

        if self.shape is None:
            return self.network().onnx()
        if self.kind == "few_bits":
            return _packed_product(self.name, self.shape, dtype or self.dtype)
        kinds = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
        operator, attributes, inputs, result = self._node()
        kind = kinds[dtype or self.dtype]
        nodes = [helper.make_node(operator, list(inputs), ["result"], **attributes)]
        filters = [helper.make_tensor(name, kind, shape, _filters(shape))
                   for name, shape in inputs.items() if name == "w"]
        shapes = {name: shape for name, shape in {**inputs, "result": result}.items() if name != "w"}
        if operator == "Conv":  # among others a convolution has its images with their channels last, as the peer has
            shapes = {name: (n, h, w, c) for name, (n, c, h, w) in shapes.items()}
            nodes = [helper.make_node("Transpose", ["x"], ["image"], perm=[0, 3, 1, 2]),
                     helper.make_node(operator, ["image", "w"], ["sums"], **attributes),
                     helper.make_node("Transpose", ["sums"], ["result"], perm=[0, 2, 3, 1])]
        values = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
        graph = helper.make_graph(nodes, self.name, values[:-1], values[-1:], filters)
        opsets = [helper.make_opsetid("", 23 if operator == "Attention" else 17)]
        # the oldest format that has them: onnxruntime does not read what is newer than itself
        return helper.make_model(graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets))

    def _node(self) -> tuple[str, dict[str, Any], dict[str, tuple[int, ...]], tuple[int, ...]]:
        """The operator, its attributes, the shapes of its inputs, and of its result."""
        assert self.shape is not None
        if self.kind in ("product", "few_bits"):
            m, n, k = self.shape
            return "MatMul", {}, {"a": (m, k), "b": (k, n)}, (m, n)
        if self.kind == "attention":
            batch, heads, queries, keys, size, causal = self.shape
            asked, known = ((batch, heads, length, size) for length in (queries, keys))
            return "Attention", {"is_causal": causal}, {"q": asked, "k": known, "v": known}, asked
        if self.kind == "convolution":
            batch, channels, size, filters, window, stride = self.shape
            out = (size + 2 * (window // 2) - window) // stride + 1
            attributes = {"pads": [window // 2] * 4, "strides": [stride] * 2}
            inputs = {"x": (batch, channels, size, size), "w": (filters, channels, window, window)}
            return "Conv", attributes, inputs, (batch, filters, out, out)
        rows, columns = self.shape
        if self.kind == "softmax":
            return "Softmax", {"axis": -1}, {"x": (rows, columns)}, (rows, columns)
        return "LayerNormalization", {}, {"x": (rows, columns), "g": (columns,), "b": (columns,)}, (rows, columns)

    def rates(self, seconds: float) -> dict[str, float]:
        """TFLOP/s of products, attention and convolutions, GB/s of what only moves and of products of few rows."""
        if self.shape is None:
            return {}
        _, _, inputs, result = self._node()
        if self.kind in ("softmax", "layer_norm"):
            bytes_moved = (prod(result) + sum(map(prod, inputs.values()))) * (4 if self.dtype == "float32" else 2)
            return {"gigabytes": 1e-9 * bytes_moved / seconds}
        if self.kind == "attention":
            terms = 2 * self.shape[3] * prod(result) // (1 + self.shape[5])
        elif self.kind == "convolution":
            terms = prod(result) * prod(inputs["w"][1:])
        else:
            terms = prod(self.shape)
        rates = {"tflops": 2e-12 * terms / seconds}
        if self.kind in ("product", "few_bits") and self.shape[0] <= _FEW:
            size = 4 if self.dtype == "float32" else 2
            weights = prod(inputs["b"]) * (size if self.kind == "product" else 0.5 + size / _BLOCK)
            rates["gigabytes"] = 1e-9 * ((prod(result) + prod(inputs["a"])) * size + weights) / seconds
        return rates


def _packed_product(name: str, shape: tuple[int, ...], dtype: str) -> onnx.ModelProto:
    """A product with random weights of 4 bits whose scales float16 holds, in whichever type."""
    from onnx import TensorProto, helper, numpy_helper

    m, n, k = shape
    rng = np.random.default_rng(0)
    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[dtype]
    packed = rng.integers(0, 256, (n, k // _BLOCK, _BLOCK // 2), dtype=np.uint8)
    scales = rng.uniform(0.002, 0.006, (n, k // _BLOCK)).astype(np.float16).astype(dtype)
    node = helper.make_node("MatMulNBits", ["a", "b", "scales"], ["result"], domain="com.microsoft", K=k, N=n, bits=4,
                            block_size=_BLOCK)
    values = [helper.make_tensor_value_info(name, kind, shape) for name, shape in (("a", (m, k)), ("result", (m, n)))]
    graph = helper.make_graph([node], name, values[:1], values[1:], [
        numpy_helper.from_array(packed, "b"), numpy_helper.from_array(scales, "scales")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _filters(shape: tuple[int, ...]) -> np.ndarray:
    """Constant weights, as networks have them, that keep the size of what they multiply."""
    return np.random.default_rng(0).standard_normal(shape) * prod(shape[1:]) ** -0.5


def cases(
    products: Sequence[tuple[int, int, int]] = PRODUCTS, models: Sequence[tuple[str, int]] = MODELS
) -> Iterator[Case]:
    """Products in each type, and by ``mma.sync``, the other kernels, then the models."""
    for dtype, arch in (*((dtype, "") for dtype in ("bfloat16", "float16", "float32")), *_BY_MMA):
        for m, n, k in products:
            yield Case(f"{m}x{n}x{k}-{dtype}{f'-{arch}' if arch else ''}", dtype, (m, n, k), arch=arch)
    others: dict[str, tuple[Sequence[tuple[int, ...]], str]] = {
        "few_bits": (FEW_BITS, "float16"), "attention": (ATTENTIONS, "float16"),
        "convolution": (CONVOLUTIONS, "float16"), "softmax": (ROWS, "float32"), "layer_norm": (ROWS, "float32"),
    }
    for kind, (shapes, dtype) in others.items():
        for shape in shapes:
            yield Case(f"{kind}-{'x'.join(map(str, shape))}-{dtype}", dtype, shape, kind)
    for name, batch in models:
        yield Case(f"{name}-{batch}-float16", "float16", None, name, batch)
