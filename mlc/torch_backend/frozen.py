"""A captured graph as ``torch.export`` takes it: with weights and numbers as constants, and operators kept whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mlc.errors import ModelError
from mlc.torch_backend.dynamic_shapes import Symbols, numbers, places

__all__ = ["Frozen", "composed"]


class Frozen(torch.nn.Module):
    """A graph that takes the tensors ``inputs`` alone, and behind them, as tensors, the numbers that are free; the
    other arguments are part of it."""

    def __init__(
        self, graph: torch.fx.GraphModule, args: Sequence[Any], inputs: Sequence[int], symbols: Symbols
    ) -> None:
        super().__init__()
        self.graph, constants = _bare(graph)
        args = (*args, *constants)
        self.inputs, self.count = inputs, len(args)
        self.sizes, self.numbers = places(symbols, inputs), numbers(symbols, inputs)
        self.others = {
            i: arg for i, arg in enumerate(args)
            if not isinstance(arg, torch.Tensor) and i not in self.sizes and i not in self.numbers
        }
        self.frozen = [i for i in range(self.count) if isinstance(args[i], torch.Tensor) and i not in set(inputs)]
        for i in self.frozen:
            self.register_buffer(f"weight_{i}", args[i].detach())

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given: dict[int, Any] = dict(zip([*self.inputs, *self.numbers], tensors, strict=True))
        given.update({i: given[i].item() for i in self.numbers})
        given.update({i: getattr(self, f"weight_{i}") for i in self.frozen})
        given.update(self.others)
        given.update({i: given[source].shape[axis] for i, (source, axis) in self.sizes.items()})
        return tuple(v for v in self.graph(*(given[i] for i in range(self.count))) if isinstance(v, torch.Tensor))


def _bare(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A copy without what tracing noted at the nodes, in which fused operators are what export knows them as.

    Tensors that the code itself holds become arguments after the others, since export loses those of nested modules.
    """
    copy, constants = torch.fx.Graph(), list[torch.Tensor]()
    copy.output(copy.graph_copy(graph.graph, {}))
    last = next(node for node in copy.nodes if node.op != "placeholder")
    for node in copy.nodes:
        node.meta = {}
        node.target = composed(node) or node.target
        value = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor):
            with copy.inserting_before(last):
                node.replace_all_uses_with(copy.placeholder(f"constant_{len(constants)}"))
            constants.append(value)
    for node in [node for node in copy.nodes if node.op == "get_attr" and not node.users]:
        copy.erase_node(node)
    return torch.fx.GraphModule(graph, copy), constants


def composed(node: torch.fx.Node) -> Callable[..., Any] | None:
    """Replace a fused operator of PyTorch's inference by operators that export keeps."""
    function, drops = _COMPOSED.get(node.target, (None, None))
    return None if drops is not None and len(node.args) > drops and node.args[drops] else function


def _attention(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, None]:
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale), None


def _multi_head(
    query: Any, key: Any, value: Any, width: int, heads: int, weight: Any, bias: Any, out_weight: Any, out_bias: Any,
    mask: Any = None, need_weights: bool = True, average: bool = True, mask_type: int | None = None,
) -> tuple[Any, None]:
    if need_weights:
        raise ModelError("attention of many heads must not need its weights to be compiled")
    seen = None
    if mask is not None:  # what it hides: of pairs of places, of a sequence's places, or of each head's pairs
        hidden = mask.to(torch.bool)
        seen = ~(hidden[:, None, None, :] if mask_type == 1 else hidden)

    def parted(x: Any, i: int) -> Any:
        one = slice(i * width, (i + 1) * width)
        return torch.nn.functional.linear(x, weight[one], bias[one]).unflatten(-1, (heads, -1)).transpose(1, 2)

    found, _ = _attention(*(parted(x, i) for i, x in enumerate((query, key, value))), attn_mask=seen)
    return torch.nn.functional.linear(found.transpose(1, 2).flatten(2), out_weight, out_bias), None


def _encoder_layer(
    x: Any, width: int, heads: int, weight: Any, bias: Any, out_weight: Any, out_bias: Any, gelu: bool,
    norm_first: bool, eps: float, gain_1: Any, shift_1: Any, gain_2: Any, shift_2: Any, up: Any, up_bias: Any,
    down: Any, down_bias: Any, mask: Any = None, mask_type: int | None = None,
) -> Any:
    from torch.nn import functional as F

    def attend(x: Any) -> Any:
        return _multi_head(x, x, x, width, heads, weight, bias, out_weight, out_bias, mask, False,
                           mask_type=mask_type)[0]

    def feed(x: Any) -> Any:
        return F.linear((F.gelu if gelu else F.relu)(F.linear(x, up, up_bias)), down, down_bias)

    def norm(x: Any, gain: Any, shift: Any) -> Any:
        return F.layer_norm(x, (width,), gain, shift, eps)

    if norm_first:
        x = x + attend(norm(x, gain_1, shift_1))
        return x + feed(norm(x, gain_2, shift_2))
    x = norm(x + attend(x), gain_1, shift_1)
    return norm(x + feed(x), gain_2, shift_2)


#: fused operator -> what it is composed of, and which argument of it is the part that it drops at random
_COMPOSED: dict[Any, tuple[Callable[..., Any], int | None]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (_attention, 3),
    torch.ops.aten._native_multi_head_attention.default: (_multi_head, None),
    torch.ops.aten._transformer_encoder_layer_fwd.default: (_encoder_layer, None),
}
