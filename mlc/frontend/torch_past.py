"""Language models of transformers as ONNX models whose past is an input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlc.errors import ModelError, UsageError
from mlc.frontend.pytorch import quiet

if TYPE_CHECKING:
    import onnx

__all__ = ["export_decoder"]

#: sizes of the example that is traced, different from each other and from 1, which exporters take for a constant
_BATCH, _PAST, _LENGTH = 2, 5, 3


def export_decoder(module: Any) -> onnx.ModelProto:
    """A causal language model of transformers, in evaluation mode, with ``past_key_values.N.key`` and ``.value`` among
    its inputs and ``present.N.key`` and ``.value`` among its outputs.

    Raises :class:`UsageError` for a module without transformers' ``config``, and :class:`ModelError` where ONNX cannot
    hold what it does.
    """
    import torch
    from transformers import DynamicCache

    config = getattr(module, "config", None)
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if config is None or not layers or not heads:
        raise UsageError(f"a module that generates must be a causal language model of transformers, got "
                         f"{type(module).__name__}; export it to ONNX with its past as inputs and outputs")
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads

    class WithPast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> tuple[Any, ...]:
            cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
            made = self.module(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                               past_key_values=cache, use_cache=True)
            layers = made.past_key_values.layers
            return (made.logits, *(x for layer in layers for x in (layer.keys, layer.values)))

    sides = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    positions = torch.arange(_PAST, _PAST + _LENGTH).expand(_BATCH, _LENGTH).contiguous()
    example = (torch.zeros(_BATCH, _LENGTH, dtype=torch.int64), torch.ones(_BATCH, _PAST + _LENGTH, dtype=torch.int64),
               positions, *(torch.zeros(_BATCH, groups, _PAST, size) for _ in sides))
    free = {"input_ids": (0, 1), "attention_mask": (0, 1), "position_ids": (0, 1), "past": (0, 2)}
    ids, mask, places, past = ({axis: torch.export.Dim.DYNAMIC for axis in axes} for axes in free.values())
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), quiet():
            made = torch.onnx.export(
                WithPast().eval(), example, dynamo=True, verbose=False,
                input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{s}" for s in sides)],
                output_names=["logits", *(f"present.{s}" for s in sides)],
                dynamic_shapes=(ids, mask, places, tuple(past for _ in sides)),
            )
            return made.model_proto
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(f"torch.onnx must be able to export {type(module).__name__} with its past, but: {reason}; "
                         "export it by other means and give the ONNX file") from error
    finally:
        module.train(training)
