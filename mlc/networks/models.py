"""Networks by name, with random weights that are the same on every machine.

BERT and GPT-2 are exported from ``transformers`` configurations, MobileNetV2 and the vision transformer from
:mod:`mlc.networks.modules`, the convolutional ones are those of :mod:`mlc.networks.light`; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlc.networks.light import LIGHT_MODELS, light_model

if TYPE_CHECKING:
    import onnx

__all__ = [
    "BATCHED_MODELS", "BENCHMARK_MODELS", "EXPORTED_MODELS", "MODELS", "Network", "bert_base", "bert_tiny",
    "detector", "gpt2_small", "gpt2_tiny", "mobilenet_v2", "model_named", "network", "torch_program", "vit_tiny",
]

#: models that need PyTorch
EXPORTED_MODELS = ("bert_base", "bert_tiny", "gpt2_small", "gpt2_tiny", "mobilenet_v2", "vit_tiny")
#: a light model at another batch size
BATCHED_MODELS = {"resnet50_b8": ("resnet50", 8)}
MODELS = (*LIGHT_MODELS, *EXPORTED_MODELS, *BATCHED_MODELS)
#: what the measured table and the shipped logs are about
BENCHMARK_MODELS = (*LIGHT_MODELS, "bert_base", "gpt2_small", "mobilenet_v2", "vit_tiny", *BATCHED_MODELS)
_EAGER: dict[str, Any] = {"attn_implementation": "eager"}  # plain operators, no fused attention


def model_named(name: str) -> onnx.ModelProto:
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


def bert_base(seq: int = 128, free: bool = False, **config: Any) -> onnx.ModelProto:
    """BERT-base: int64 ``input_ids, attention_mask, token_type_ids`` of ``(1, seq)`` to hidden states and pooled; with
    ``free`` of ``(batch, sequence)``. ``config`` is what transformers' configuration has otherwise."""
    return _bert(seq, **config).onnx({0: "batch", 1: "sequence"} if free else None)


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


def detector(image: int = 320) -> onnx.ModelProto:
    """A single-shot detector on MobileNetV2: f32 ``image`` of ``(1, 3, height, width)``, both free, to box offsets
    ``(1, anchors, 4)`` and scores ``(1, anchors, 21)``."""
    def build() -> Any:
        from mlc.networks.modules import Detector

        return Detector()

    return Network(build, {"image": (1, 3, image, image)}, ["boxes", "scores"]).onnx({2: "height", 3: "width"})


def vit_tiny(image: int = 224, depth: int = 12, batch: int = 1) -> onnx.ModelProto:
    """ViT-Tiny, patches of 16 pixels: f32 ``image`` of ``(batch, 3, image, image)`` to ``(batch, 1000)``."""
    return _vit(image, depth, batch).onnx()


def network(name: str, batch: int = 1, fused: bool = False) -> Network | None:
    """A model that PyTorch defines, None for the others, of the weights and names of inputs of :func:`model_named`.
    With ``fused``, transformers attend by PyTorch's fused operator, its own fastest way."""
    config = {"attn_implementation": "sdpa"} if fused else {}
    networks: dict[str, Callable[[], Network]] = {
        "bert_base": lambda: _bert(128, **config), "gpt2_small": lambda: _gpt2(128, **config),
        "mobilenet_v2": lambda: _mobilenet(1), "vit_tiny": lambda: _vit(224, 12, 1),
    }
    return networks[name]().batched(batch) if name in networks else None


def torch_program(name: str) -> Any:
    """The ``torch.export.ExportedProgram`` of a :func:`network` that attends by PyTorch's fused operator, or None."""
    found = network(name, fused=True)
    return found.program() if found is not None else None


@dataclass(frozen=True)
class Network:
    """A module that ``build`` makes, with seeded random weights, and its border.

    Inputs whose names end in ``_ids`` or ``_mask`` are whole numbers. Outputs without ``outputs`` are named by PyTorch.
    """

    build: Callable[[], Any]
    inputs: Mapping[str, tuple[int, ...]]
    outputs: Sequence[str] | None = None

    def batched(self, batch: int) -> Network:
        """The same network with another size of its inputs' first axis."""
        return replace(self, inputs={name: (batch, *shape[1:]) for name, shape in self.inputs.items()})

    def onnx(self, free: Mapping[int, str] | None = None) -> onnx.ModelProto:
        """Export with ``torch.onnx``, weights included; ``free`` names the dynamic axes of all inputs."""
        import torch

        from mlc.frontend.pytorch import quiet

        dims = {axis: torch.export.Dim(name) for axis, name in (free or {}).items()}
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                self._module(), self._example(dims), input_names=list(self.inputs), output_names=self.outputs,
                dynamo=True, verbose=False, dynamic_shapes=tuple(dims for _ in self.inputs) if dims else None,
            )
        return program.model_proto

    def program(self) -> Any:
        """The ``torch.export.ExportedProgram``."""
        from mlc.frontend.pytorch import export_module

        return export_module(self._module(), self._example(), "the model")

    def _module(self) -> Any:
        """The module in evaluation mode, with parameters drawn with seed 0."""
        import torch

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            module = self.build().eval()
            for parameter in module.parameters():
                if parameter.ndim == 1:  # biases start at 0 and norms at 1: a program that skips them would pass
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return module

    def _example(self, free: Collection[int] = ()) -> tuple[Any, ...]:
        import torch

        shapes = {  # PyTorch takes a 1 for a number that stays
            name: [max(size, 2) if axis in free else size for axis, size in enumerate(shape)]
            for name, shape in self.inputs.items()
        }
        return tuple(
            torch.ones(shape, dtype=torch.int64 if name.endswith(("_ids", "_mask")) else torch.float32)
            for name, shape in shapes.items()
        )


def _mobilenet(batch: int) -> Network:
    def build() -> Any:
        from mlc.networks.modules import MobileNetV2

        return MobileNetV2()

    return Network(build, {"image": (batch, 3, 224, 224)}, ["scores"])


def _vit(image: int, depth: int, batch: int) -> Network:
    def build() -> Any:
        from mlc.networks.modules import VisionTransformer

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


