"""Real networks with random weights, the same on every machine, for tests, the demo and the benchmarks.

The nine convolutional networks are the ``light_*.onnx`` files inside the ``onnx`` package. Their weights are
``ConstantOfShape``, so every output element would be one constant and a wrong program would pass; here each
weight is drawn from a seeded generator, scaled for its role, so that activations stay near one from input to
logits. BERT and GPT-2 are exported from ``transformers`` configurations, MobileNetV2 and the vision transformer from
:mod:`mlc.testing.networks`; nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import onnx

__all__ = [
    "BATCHED_MODELS", "BENCHMARK_MODELS", "EXPORTED_MODELS", "LIGHT_MODELS", "MODELS", "Network", "bert_base",
    "bert_tiny", "gpt2_small", "gpt2_tiny", "light_model", "light_path", "mobilenet_v2", "random_inputs", "test_model",
    "torch_program", "vit_tiny",
]

LIGHT_MODELS = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
)
#: models that need PyTorch
EXPORTED_MODELS = ("bert_base", "bert_tiny", "gpt2_small", "gpt2_tiny", "mobilenet_v2", "vit_tiny")
#: a light model at another batch size
BATCHED_MODELS = {"resnet50_b8": ("resnet50", 8)}
MODELS = (*LIGHT_MODELS, *EXPORTED_MODELS, *BATCHED_MODELS)
#: what the measured table and the shipped logs are about
BENCHMARK_MODELS = (*LIGHT_MODELS, "bert_base", "gpt2_small", "mobilenet_v2", "vit_tiny", *BATCHED_MODELS)
_EAGER: dict[str, Any] = {"attn_implementation": "eager"}  # plain operators, no fused attention

# A residual branch adds its variance to the trunk's; a smaller last scale keeps deep sums near one.
_RESIDUAL_SCALE = 0.3
_BATCH_NORM_ROLES = {1: "scale", 2: "bias", 3: "bias", 4: "variance"}


class _Spec(Protocol):
    """What :func:`random_inputs` needs of ``mlc.frontend.TensorSpec``."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def test_model(name: str) -> onnx.ModelProto:
    """Any model of :data:`MODELS` by its name; raises ``KeyError`` with the names for any other."""
    if name in LIGHT_MODELS:
        return light_model(name)
    if name in BATCHED_MODELS:
        light, batch = BATCHED_MODELS[name]
        return light_model(light, batch=batch)
    builders: dict[str, Callable[[], onnx.ModelProto]] = {
        "bert_base": bert_base, "bert_tiny": bert_tiny, "gpt2_small": gpt2_small, "gpt2_tiny": gpt2_tiny,
        "mobilenet_v2": mobilenet_v2, "vit_tiny": vit_tiny,
    }
    if name not in builders:
        raise KeyError(f"the name must be one of {', '.join(MODELS)}, got {name!r}")
    return builders[name]()


test_model.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest takes its name for


def light_path(name: str) -> Path:
    """Where the ``onnx`` package keeps the untouched light model."""
    import onnx

    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"


def light_model(name: str, seed: int = 0, batch: int = 1) -> onnx.ModelProto:
    """A light model whose parameters are all seeded random initializers, with one input, the image.

    ``name`` is one of :data:`LIGHT_MODELS`; the input is f32 ``(batch, 3, 224, 224)`` and meant to be standard normal.
    """
    import onnx

    if name not in LIGHT_MODELS:
        raise KeyError(f"a light model must be one of {', '.join(LIGHT_MODELS)}, got {name!r}")
    model = onnx.load(light_path(name))
    graph = model.graph
    roles = _parameter_roles(graph)
    shapes = _parameter_shapes(graph)
    given = {tensor.name: tensor for tensor in graph.initializer}
    used = {i for node in graph.node if node.op_type != "ConstantOfShape" for i in node.input}
    rng = np.random.default_rng(seed)
    filled = []
    for parameter in sorted(shapes.keys() & used):
        if parameter in roles:
            values = _draw(rng, roles[parameter], shapes[parameter])
            filled.append(_raw_tensor(parameter, values))
        else:
            filled.append(_batched(given[parameter], batch))  # the shape argument of a Reshape
    nodes = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    inputs = [i for i in graph.input if i.name in used and i.name not in shapes]
    for value in (*inputs, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_value *= batch
    filled_graph = onnx.helper.make_graph(nodes, name, inputs, graph.output, filled)
    # From IR version 4 on, initializers need not be listed as inputs.
    return onnx.helper.make_model(filled_graph, ir_version=8, opset_imports=model.opset_import)


def _batched(shape: onnx.TensorProto, batch: int) -> onnx.TensorProto:
    """The shape that a Reshape of activations wants, for ``batch`` images instead of one."""
    from onnx import numpy_helper

    dims = numpy_helper.to_array(shape).copy()
    if batch > 1 and dims[0] == 1:
        dims[0] = batch
    return numpy_helper.from_array(dims, shape.name)


def _parameter_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    from onnx import numpy_helper

    given = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {name: tuple(tensor.dims) for name, tensor in given.items()}
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            shapes[node.output[0]] = tuple(int(d) for d in numpy_helper.to_array(given[node.input[0]]))
    return shapes


def _parameter_roles(graph: onnx.GraphProto) -> dict[str, tuple[str, float]]:
    """Parameter -> (role, gain), from the node that uses it."""
    summed = {i for node in graph.node if node.op_type == "Sum" for i in node.input}
    reshaped = {node.output[0]: node.input[0] for node in graph.node if node.op_type in ("Unsqueeze", "Reshape")}
    producers = {node.output[0]: node for node in graph.node}
    roles: dict[str, tuple[str, float]] = {}
    for node in graph.node:
        residual = _RESIDUAL_SCALE if node.output[0] in summed else 1.0
        if node.op_type in ("Conv", "Gemm"):
            transposed = node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute)
            weight = reshaped.get(node.input[1], node.input[1])
            roles[weight] = ("weight" if transposed else "weight_transposed", _gain(node.input[0], producers))
            if len(node.input) > 2:
                roles[node.input[2]] = ("bias", 1.0)
        elif node.op_type == "BatchNormalization":
            for position, role in _BATCH_NORM_ROLES.items():
                roles[node.input[position]] = (role, residual if role == "scale" else 1.0)
        elif node.op_type in ("Mul", "Add"):  # a learned scale or shift of each channel
            for name in node.input:
                if name in reshaped:
                    roles[reshaped[name]] = ("scale" if node.op_type == "Mul" else "bias", 1.0)
    return roles


def _gain(value: str, producers: dict[str, onnx.NodeProto]) -> float:
    """He's factor for a weight that reads ``value``: a rectifier halves the second moment, a maximum doubles it."""
    node = producers.get(value)
    while node is not None and node.op_type in ("Concat", "Transpose", "Reshape", "Dropout", "LRN"):
        node = producers.get(node.input[0])
    return math.sqrt(2.0) if node is not None and node.op_type == "Relu" else 1.0


def _draw(rng: np.random.Generator, role: tuple[str, float], shape: tuple[int, ...]) -> np.ndarray:
    kind, gain = role
    if kind.startswith("weight"):
        shape_2d = shape[2:] if shape[:2] == (1, 1) else shape  # a classifier stored with two leading ones
        fan_in = math.prod(shape_2d[1:]) if kind == "weight" else shape_2d[0]
        values = rng.standard_normal(shape, dtype=np.float32)
        values *= np.float32(gain / math.sqrt(fan_in))
        return values
    if kind == "bias":
        return np.float32(0.1) * rng.standard_normal(shape, dtype=np.float32)
    if kind == "scale":
        return rng.uniform(0.8 * gain, 1.2 * gain, shape).astype(np.float32)
    return rng.uniform(0.6, 1.6, shape).astype(np.float32)  # a variance


def _raw_tensor(name: str, values: np.ndarray) -> onnx.TensorProto:
    import onnx

    # Half a gigabyte of VGG: bytes, never a Python list.
    return onnx.numpy_helper.from_array(np.ascontiguousarray(values), name)


def bert_base(seq: int = 128) -> onnx.ModelProto:
    """BERT-base: int64 ``input_ids, attention_mask, token_type_ids`` of ``(1, seq)`` to hidden states and pooled."""
    return _bert(seq).onnx()


def bert_tiny(seq: int = 16) -> onnx.ModelProto:
    """BERT with two layers of 64 channels and 4 heads."""
    return _bert(seq, num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128,
                 vocab_size=200, initializer_range=0.125).onnx()


def gpt2_small(seq: int = 128) -> onnx.ModelProto:
    """GPT-2 small without the vocabulary head: int64 ``input_ids`` of ``(1, seq)`` to f32 ``(1, seq, 768)``."""
    return _gpt2(seq).onnx()


def gpt2_tiny(seq: int = 16) -> onnx.ModelProto:
    """GPT-2 with two layers of 64 channels and 4 heads."""
    return _gpt2(seq, n_layer=2, n_embd=64, n_head=4, vocab_size=200, initializer_range=0.125, bos_token_id=0,
                 eos_token_id=0).onnx()


def mobilenet_v2(batch: int = 1) -> onnx.ModelProto:
    """MobileNetV2 at width 1: f32 ``image`` of ``(batch, 3, 224, 224)`` to ``(batch, 1000)``."""
    return _mobilenet(batch).onnx()


def vit_tiny(image: int = 224, depth: int = 12, batch: int = 1) -> onnx.ModelProto:
    """ViT-Tiny, patches of 16 pixels: f32 ``image`` of ``(batch, 3, image, image)`` to ``(batch, 1000)``."""
    return _vit(image, depth, batch).onnx()


def torch_program(name: str) -> Any:
    """The ``torch.export.ExportedProgram`` of a model that PyTorch defines, None for the others.

    Weights and the names of inputs are those of :func:`test_model`. Transformers attend by PyTorch's fused operator,
    its own fastest way.
    """
    networks: dict[str, Callable[[], Network]] = {
        "bert_base": lambda: _bert(128, attn_implementation="sdpa"),
        "gpt2_small": lambda: _gpt2(128, attn_implementation="sdpa"),
        "mobilenet_v2": lambda: _mobilenet(1), "vit_tiny": lambda: _vit(224, 12, 1),
    }
    return networks[name]().program() if name in networks else None


@dataclass(frozen=True)
class Network:
    """A module that ``build`` makes, with seeded random weights, and its border.

    Inputs whose names end in ``_ids`` or ``_mask`` are whole numbers. Outputs without ``outputs`` are named by PyTorch.
    """

    build: Callable[[], Any]
    inputs: Mapping[str, tuple[int, ...]]
    outputs: Sequence[str] | None = None

    def onnx(self) -> onnx.ModelProto:
        """By ``torch.onnx``, weights inside."""
        import torch

        from mlc.frontend.pytorch import quiet

        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                self._module(), self._example(), input_names=list(self.inputs), output_names=self.outputs,
                dynamo=True, verbose=False,
            )
        return program.model_proto

    def program(self) -> Any:
        """The ``torch.export.ExportedProgram``."""
        from mlc.frontend.pytorch import export_module

        return export_module(self._module(), self._example(), "the model")

    def _module(self) -> Any:
        """In evaluation mode, its parameters drawn with seed 0."""
        import torch

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            module = self.build().eval()
            for parameter in module.parameters():
                if parameter.ndim == 1:  # biases start at 0 and norms at 1: a program that skips them would pass
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return module

    def _example(self) -> tuple[Any, ...]:
        import torch

        return tuple(
            torch.ones(shape, dtype=torch.int64 if name.endswith(("_ids", "_mask")) else torch.float32)
            for name, shape in self.inputs.items()
        )


def _mobilenet(batch: int) -> Network:
    def build() -> Any:
        from mlc.testing.networks import MobileNetV2

        return MobileNetV2()

    return Network(build, {"image": (batch, 3, 224, 224)}, ["scores"])


def _vit(image: int, depth: int, batch: int) -> Network:
    def build() -> Any:
        from mlc.testing.networks import VisionTransformer

        return VisionTransformer(image, depth=depth)

    return Network(build, {"image": (batch, 3, image, image)}, ["scores"])


def _bert(seq: int, **config: Any) -> Network:
    def build() -> Any:
        import torch
        from transformers import BertConfig, BertModel

        class Bert(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bert = BertModel(BertConfig(**{**_EAGER, **config}))

            def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
                return self.bert(input_ids, attention_mask, token_type_ids, return_dict=False)

        return Bert()

    names = ["input_ids", "attention_mask", "token_type_ids"]
    return Network(build, dict.fromkeys(names, (1, seq)), ["last_hidden_state", "pooler_output"])


def _gpt2(seq: int, **config: Any) -> Network:
    def build() -> Any:
        import torch
        from transformers import GPT2Config, GPT2Model

        class GPT2(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gpt2 = GPT2Model(GPT2Config(**{**_EAGER, **config}))

            def forward(self, input_ids: Any) -> Any:
                return self.gpt2(input_ids, use_cache=False, return_dict=False)[0]

        return GPT2()

    return Network(build, {"input_ids": (1, seq)}, ["last_hidden_state"])


def random_inputs(specs: Iterable[_Spec], seed: int = 0) -> dict[str, np.ndarray]:
    """One array per input, the same for the same seed: standard normal floats, integers in [0, 100), random booleans.

    Masks and token types are 0 or 1. Integers are taken for token ids: a model that needs others is given its own.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for spec in specs:
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            arrays[spec.name] = rng.standard_normal(spec.shape).astype(dtype)
        elif dtype.kind == "b":
            arrays[spec.name] = rng.integers(0, 2, spec.shape).astype(dtype)
        else:
            high = 2 if "mask" in spec.name or "type" in spec.name else 100
            arrays[spec.name] = rng.integers(0, high, spec.shape).astype(dtype)
    return arrays
