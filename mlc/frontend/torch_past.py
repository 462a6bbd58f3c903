"""Language models of transformers as ONNX models whose past is an input."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlc.errors import ModelError, UsageError
from mlc.frontend.pytorch import export_module, first_line, quiet, to_onnx

if TYPE_CHECKING:
    import onnx
    import torch

__all__ = ["export_decoder"]

#: sizes of the example that is traced, different from each other and from 1, which exporters take for a constant
_BATCH, _PAST, _LENGTH = 2, 5, 3
#: what a call of the model may be given besides the past
_INPUTS = ("input_ids", "attention_mask", "position_ids")
#: what transformers call the past, the later versions first
_PASTS = ("cache", "past_key_values")
#: layers of caches that keep the keys and values of all tokens, or nothing
_LAYERS = frozenset({"DynamicLayer", "DummyLayer"})
_WHOLE = "compile it with mlc.compile, and give it all tokens each time"


def export_decoder(module: Any, capacity: int | None = None) -> onnx.ModelProto:
    """A causal language model of transformers, in evaluation mode, with ``past_key_values.N.key`` and ``.value`` among
    its inputs and ``present.N.key`` and ``.value`` among its outputs.

    All of the past is kept, also where attention reaches over a window of it: masks hide what lies before. Raises
    :class:`UsageError` for a module that is no such model, or whose angles depend on the length of texts as long as
    ``capacity``, and :class:`ModelError` for one that keeps anything else
    than keys and values of its own tokens, or where ONNX cannot hold what it does.
    """
    import torch

    name = type(module).__name__
    taken, called = _inputs(module, name)
    training, undone = module.training, contextlib.ExitStack()
    module.eval()
    try:
        _fix_angles(module, name, capacity, undone)
        with torch.no_grad(), quiet():
            rows = _rows(module, called, name)
        examples = {"input_ids": torch.zeros(_BATCH, _LENGTH, dtype=torch.int64),
                    "attention_mask": torch.ones(_BATCH, _PAST + _LENGTH, dtype=torch.int64),
                    "position_ids": torch.arange(_PAST, _PAST + _LENGTH).expand(_BATCH, _LENGTH).contiguous()}
        given = [*(examples[each] for each in taken), *(
            torch.zeros(_BATCH, x.shape[1], _PAST, x.shape[3], dtype=x.dtype) for pair in rows.values() for x in pair)]
        free = torch.export.Dim.DYNAMIC
        sizes = tuple({0: free, 1 if x.dim() == 2 else 2: free} for x in given)
        program = export_module(_with_past(module, taken, called, list(rows)), given, name, (sizes,))
    finally:
        undone.close()
        module.train(training)
    states = [f"{i}.{kind}" for i in range(len(rows)) for kind in ("key", "value")]
    return to_onnx(program, name, inputs=[*taken, *(f"past_key_values.{each}" for each in states)],
                   outputs=["logits", *(f"present.{each}" for each in states)])


def _inputs(module: Any, name: str) -> tuple[list[str], str]:
    """Which of :data:`_INPUTS` the module takes, and what it calls the past."""
    config, given = getattr(module, "config", None), inspect.signature(module.forward).parameters
    if getattr(config, "is_encoder_decoder", False) and "encoder_outputs" in given:
        raise ModelError(f"a module that generates must be a decoder alone, but {name} has an encoder too; {_WHOLE}")
    if config is None or "input_ids" not in given:
        raise UsageError(f"a module that generates must be a causal language model of transformers, got {name}; export "
                         "it to ONNX with its past as inputs and outputs")
    past = next((each for each in _PASTS if each in given), None)
    if past is None:
        raise ModelError(f"a module that generates must take the keys and values of former tokens (past_key_values), "
                         f"but {name} does not; {_WHOLE}")
    return [each for each in _INPUTS if each in given], past


def _fix_angles(module: Any, name: str, capacity: int | None, undone: contextlib.ExitStack) -> None:
    """Until it is undone, angles that are others for each length beyond what the model was made for (dynamic RoPE) stay
    those of shorter texts."""
    for each in module.modules():
        if getattr(each, "rope_type", None) != "dynamic":
            continue
        most = int(each.original_max_seq_len)
        if capacity is None or capacity > most:
            raise UsageError(f"{name} turns all keys by other angles for each length beyond {most} tokens (dynamic "
                             f"RoPE), which keys that are kept cannot follow; give capacity={most}, or less")
        undone.callback(setattr, each, "inv_freq", each.inv_freq)
        undone.callback(setattr, each, "rope_type", each.rope_type)
        each.inv_freq, each.rope_type = each.original_inv_freq.clone(), "default"


def _rows(module: Any, called: str, name: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values, ``[1, heads, 1, size]``, of one token, of each layer that keeps some."""
    import torch

    cache = _cache(module.config)
    for place, layer in enumerate(cache.layers):
        if type(layer).__name__ not in _LAYERS:
            raise ModelError(f"each layer of a module that generates must keep keys and values and nothing else, but "
                             f"layer {place} of {name} has a {type(layer).__name__}; {_WHOLE}")
    try:
        made = module(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True, **{called: cache})
    except Exception as error:
        raise ModelError(f"a module that generates must compute logits of token ids and former keys and values, but "
                         f"{name} fails: {first_line(error)}; {_WHOLE}") from error
    logits, found = getattr(made, "logits", None), _kept(cache)
    if logits is None or logits.dim() != 3:
        raise UsageError(f"a module that generates must give logits for each token, but {name} does not; make it a "
                         "model for causal language modelling (AutoModelForCausalLM)")
    if not found:
        raise ModelError(f"{name} must keep the keys and values of former tokens, but keeps none; {_WHOLE}")
    return found


def _cache(config: Any) -> Any:
    """An empty cache of transformers, in which layers whose attention reaches over a window keep all tokens, too."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def _kept(cache: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {place: (layer.keys, layer.values) for place, layer in enumerate(cache.layers)
            if getattr(layer, "keys", None) is not None}


def _with_past(module: Any, taken: Sequence[str], called: str, layers: Sequence[int]) -> torch.nn.Module:
    """``module`` as a function of what it takes, and of the keys and values of its ``layers``."""
    import torch

    class WithPast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *given: Any) -> tuple[Any, ...]:
            cache, past = _cache(module.config), given[len(taken):]
            for place, keys, values in zip(layers, past[::2], past[1::2], strict=True):
                cache.layers[place].update(keys, values)
            named = dict(zip(taken, given, strict=False))
            made = self.module(**named, use_cache=True, **{called: cache})
            return (made.logits, *(x for pair in _kept(cache).values() for x in pair))

    return WithPast().eval()
