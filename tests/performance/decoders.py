"""Decoders to generate with, as ONNX models with past keys and values as inputs and the present ones as outputs.

One like LLaMA, as exporters for onnxruntime write it (GroupQueryAttention with rotary positions), with the sizes of
TinyLlama and weights of 4 bits (MatMulNBits in blocks of 32) or of float32; and GPT-2, as PyTorch exports the module of
``transformers``. Weights are random. LLaMA's of float32 lie in a file of their own beside the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx
    import torch

__all__ = ["DECODERS", "Sizes", "decoder", "eager", "save", "sizes_of", "state_bytes", "weight_bytes"]

#: what :func:`save` makes
DECODERS = ("llama-4bit", "llama", "gpt2")
_BLOCK, _EPSILON = 32, 1e-5
#: in a file of their own, from so many bytes
_OUTSIDE = 1 << 16


@dataclass(frozen=True)
class Sizes:
    """Of a decoder; the defaults are TinyLlama's, 1.1 billion parameters."""

    layers: int = 22
    width: int = 2048
    inner: int = 5632
    heads: int = 32
    groups: int = 4
    vocabulary: int = 32000
    capacity: int = 512

    @property
    def head(self) -> int:
        return self.width // self.heads


def sizes_of(name: str, layers: int | None = None, capacity: int = Sizes.capacity) -> Sizes:
    """The sizes of a decoder of :data:`DECODERS`; ``layers`` of its own when left out."""
    if name == "gpt2":
        return Sizes(layers or 12, 768, 3072, 12, 12, 50257, capacity)
    return Sizes(layers or Sizes.layers, capacity=capacity)


def save(name: str, sizes: Sizes, path: Path, accuracy: int = 0) -> None:
    """Make a decoder of :data:`DECODERS` and write it to ``path``; ``accuracy`` is the level of MatMulNBits."""
    import onnx

    if name == "gpt2":
        from mlc.frontend.torch_past import export_decoder

        onnx.save(export_decoder(_gpt2(sizes)), path)
    elif name == "llama":
        weights = path.with_suffix(".weights")
        with weights.open("wb") as file:
            onnx.save(_Decoder(sizes, None, file).model(), path)
    else:
        onnx.save(decoder(sizes, accuracy), path)


def decoder(sizes: Sizes, accuracy: int | None = 0) -> onnx.ModelProto:
    """Like LLaMA: int64 ``input_ids``, ``attention_mask`` and past keys and values to logits and present ones.

    ``accuracy`` is the level of MatMulNBits; with None weights are float32.
    """
    return _Decoder(sizes, accuracy).model()


def weight_bytes(sizes: Sizes, name: str = "llama-4bit") -> int:
    """What a token reads of the weights of products: half a byte each and four for each block's scale, or four."""
    kv, w = sizes.groups * sizes.head, sizes.width
    matrices = 2 if name == "gpt2" else 3  # of the inner layer
    weights = sizes.layers * (2 * w * w + 2 * w * kv + matrices * w * sizes.inner) + w * sizes.vocabulary
    return weights // 2 + weights // _BLOCK * 4 if name == "llama-4bit" else 4 * weights


def state_bytes(sizes: Sizes, tokens: int) -> int:
    """What a token reads of the keys and values of ``tokens`` before it."""
    return 4 * 2 * sizes.layers * sizes.groups * sizes.head * tokens


def eager(name: str, sizes: Sizes, path: Path) -> torch.nn.Module:
    """The decoder of float32 that :func:`save` wrote to ``path``, as a module of ``transformers``."""
    import torch

    if name == "gpt2":
        return _gpt2(sizes)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.width, intermediate_size=sizes.inner, num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocabulary, num_attention_heads=sizes.heads, num_key_value_heads=sizes.groups,
        max_position_embeddings=sizes.capacity, rms_norm_eps=_EPSILON, bos_token_id=None, eos_token_id=None)
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    module.load_state_dict(_state(path), strict=True, assign=True)
    module.model.rotary_emb = type(module.model.rotary_emb)(config)
    return module.eval()


def _state(path: Path) -> Mapping[str, torch.Tensor]:
    """Weights by the names that ``transformers`` gives them; ONNX has those of products the other way round."""
    import onnx
    import torch
    from onnx import numpy_helper

    state = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        if tensor.name.startswith(("model.", "lm_head.")):
            weight = torch.from_numpy(np.array(numpy_helper.to_array(tensor, str(path.parent))))
            turned = tensor.name.endswith("_proj.weight") or tensor.name.startswith("lm_head.")
            state[tensor.name] = weight.T.contiguous() if turned else weight
    return state


def _gpt2(sizes: Sizes) -> torch.nn.Module:
    """Weights are larger than those that training starts with, or logits would hardly depend on the tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = GPT2LMHeadModel(GPT2Config(
            n_layer=sizes.layers, n_embd=sizes.width, n_inner=sizes.inner, n_head=sizes.heads,
            n_positions=max(sizes.capacity, 1024), vocab_size=sizes.vocabulary, bos_token_id=None,
            eos_token_id=None)).eval()
        for weight in module.transformer.h.parameters():
            weight.mul_(2.0 if weight.dim() > 1 else 1.0)
    return module


class _Decoder:
    """A decoder under construction."""

    def __init__(self, sizes: Sizes, accuracy: int | None, outside: IO[bytes] | None = None) -> None:
        """Large weights are written to ``outside`` and named by its name."""
        self._sizes, self._accuracy, self._outside, self._rng = sizes, accuracy, outside, np.random.default_rng(0)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        from onnx import TensorProto, helper

        s, value = self._sizes, helper.make_tensor_value_info
        names = [f"{layer}.{side}" for layer in range(s.layers) for side in ("key", "value")]
        self._tokens()
        shape = ["batch", s.groups, "past", s.head], ["batch", s.groups, "total", s.head]
        graph = helper.make_graph(
            self._nodes, "decoder",
            [value("input_ids", TensorProto.INT64, ["batch", "sequence"]),
             value("attention_mask", TensorProto.INT64, ["batch", "total"]),
             *(value(f"past_key_values.{n}", TensorProto.FLOAT, shape[0]) for n in names)],
            [value("logits", TensorProto.FLOAT, ["batch", "sequence", s.vocabulary]),
             *(value(f"present.{n}", TensorProto.FLOAT, shape[1]) for n in names)], self._weights)
        domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=10)

    def _constant(self, values: Any, name: str = "") -> str:
        from onnx import TensorProto, helper, numpy_helper

        array, name = np.asarray(values), name or f"w{len(self._weights)}"
        if self._outside is None or array.nbytes < _OUTSIDE:
            self._weights.append(numpy_helper.from_array(array, name))
            return name
        tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
                             data_location=TensorProto.EXTERNAL)
        place = {"location": Path(self._outside.name).name, "offset": self._outside.tell(), "length": array.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        array.tofile(self._outside)
        self._weights.append(tensor)
        return name

    def _add(self, operator: str, *inputs: str, out: Sequence[str] = (), **attributes: Any) -> str:
        from onnx import helper

        names = list(out) or [f"v{len(self._nodes)}"]
        self._nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0]

    def _dense(self, x: str, depth: int, columns: int, name: str, out: Sequence[str] = ()) -> str:
        if self._accuracy is None:
            weight = self._rng.standard_normal((depth, columns), np.float32) / np.float32(depth**0.5)
            return self._add("MatMul", x, self._constant(weight, f"{name}.weight"), out=out)
        blocks = depth // _BLOCK
        words = self._rng.integers(0, 256, (columns, blocks, _BLOCK // 2), np.uint8)
        scales = self._rng.uniform(0.5, 1.5, columns * blocks) / (4.6 * depth**0.5)  # results of variance one
        level = {"accuracy_level": self._accuracy} if self._accuracy else {}
        return self._add("MatMulNBits", x, self._constant(words), self._constant(scales.astype(np.float32)), out=out,
                         domain="com.microsoft", K=depth, N=columns, bits=4, block_size=_BLOCK, **level)

    def _gamma(self, name: str) -> str:
        return self._constant(self._rng.uniform(0.5, 1.5, self._sizes.width).astype(np.float32), f"{name}.weight")

    def _tokens(self) -> None:
        s = self._sizes
        table = self._rng.standard_normal((s.vocabulary, s.width), np.float32)
        x = self._add("Gather", self._constant(table, "model.embed_tokens.weight"), "input_ids")
        past = self._lengths()
        norms = [*(f"model.layers.{layer}.input_layernorm" for layer in range(s.layers)), "model.norm"]
        y = self._add("SimplifiedLayerNormalization", x, self._gamma(norms[0]), axis=-1, epsilon=_EPSILON)
        for layer in range(s.layers):
            name = f"model.layers.{layer}"
            x, y = self._skipped(x, self._attended(y, layer, past), f"{name}.post_attention_layernorm")
            x, y = self._skipped(x, self._inner(y, f"{name}.mlp"), norms[layer + 1])
        self._dense(y, s.width, s.vocabulary, "lm_head", ["logits"])

    def _lengths(self) -> tuple[str, ...]:
        """Of the past and in all, and the tables of rotary positions."""
        from onnx import TensorProto

        s, one = self._sizes, self._constant(np.array(1, np.int64))
        count = self._add("Sub", self._add("ReduceSum", "attention_mask", self._constant(np.array([1], np.int64)),
                                           keepdims=0), one)
        total = self._add("Gather", self._add("Shape", "attention_mask"), one, axis=0)
        turn = np.outer(np.arange(s.capacity), 1e4 ** -(np.arange(s.head // 2) / (s.head // 2)))
        tables = (self._constant(f(turn).astype(np.float32)) for f in (np.cos, np.sin))
        return (self._add("Cast", count, to=TensorProto.INT32), self._add("Cast", total, to=TensorProto.INT32), *tables)

    def _attended(self, y: str, layer: int, past: Sequence[str]) -> str:
        s = self._sizes
        name = f"model.layers.{layer}.self_attn"
        parts = [self._dense(y, s.width, count * s.head, f"{name}.{side}_proj")
                 for side, count in (("q", s.heads), ("k", s.groups), ("v", s.groups))]
        sides = [f"{layer}.{side}" for side in ("key", "value")]
        seen = self._add(
            "GroupQueryAttention", *parts, *(f"past_key_values.{n}" for n in sides), *past,
            out=[f"seen{layer}", *(f"present.{n}" for n in sides)], domain="com.microsoft", num_heads=s.heads,
            kv_num_heads=s.groups, do_rotary=1)
        return self._dense(seen, s.width, s.width, f"{name}.o_proj")

    def _inner(self, y: str, name: str) -> str:
        s = self._sizes
        gate, up = (self._dense(y, s.width, s.inner, f"{name}.{side}_proj") for side in ("gate", "up"))
        gate = self._add("Mul", gate, self._add("Sigmoid", gate))
        return self._dense(self._add("Mul", gate, up), s.inner, s.width, f"{name}.down_proj")

    def _skipped(self, x: str, y: str, name: str) -> tuple[str, str]:
        """The sum, and that normalised."""
        self._add("SkipSimplifiedLayerNormalization", x, y, self._gamma(name), out=[name, "", "", f"{name}.sum"],
                  domain="com.microsoft", epsilon=_EPSILON)
        return f"{name}.sum", name
