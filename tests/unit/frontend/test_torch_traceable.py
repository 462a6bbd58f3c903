"""Models of transformers whose loops data decides, with random weights, against eager PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mlc
from mlc.errors import ModelError
from mlc.frontend import torch_traceable

_TOKENS: dict[str, Any] = {"vocab_size": 99, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
                           "eos_token_id": 2, "decoder_start_token_id": 2}
_LAYERS: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 32}
#: capacities such that some tokens find no room
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 32,
             "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "switch_transformers": {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_decoder_layers": 1,
                            "num_heads": 4, "num_experts": 4, "num_sparse_encoder_layers": 1,
                            "num_sparse_decoder_layers": 1, "expert_capacity": 2},
    "nllb-moe": {**_LAYERS, "num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1,
                 "expert_capacity": 3, "moe_token_dropout": 0.2},
}


class Logits(nn.Module):
    """A model of text as a function of tokens alone."""

    def __init__(self, name: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        super().__init__()
        torch.manual_seed(0)
        self.two = name != "dbrx"
        kind = AutoModelForSeq2SeqLM if self.two else AutoModelForCausalLM
        self.model = kind.from_config(AutoConfig.for_model(name, **_TOKENS, **CONFIGURATIONS[name]))
        for weight in self.model.parameters():  # as they are drawn, logits hardly depend on the tokens
            nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 3.0 / weight.shape[-1] ** 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        others = {"decoder_input_ids": ids[:, :4], "decoder_attention_mask": torch.ones_like(ids[:, :4]),
                  "attention_mask": torch.ones_like(ids)} if self.two else {}
        return self.model(input_ids=ids, use_cache=False, **others).logits


def _tokens(seed: int, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 99, (2, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [
    "dbrx", *(pytest.param(name, marks=pytest.mark.slow) for name in ("switch_transformers", "nllb-moe"))])
def test_experts_that_a_loop_visits(name: str) -> None:
    module = Logits(name).eval()
    exe = mlc.compile(module, example_inputs=(_tokens(1),), log=False)
    assert not any("forward" in vars(each) for each in module.modules()), "the module stays as it was"
    for ids in map(_tokens, (1, 2)):
        with torch.no_grad():
            wanted = module(ids).numpy()
        np.testing.assert_allclose(exe(ids.numpy())[0], wanted, atol=1e-5 * np.abs(wanted).max(), rtol=1e-5)


def test_what_computes_something_else_stands_in_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another version of transformers changes its experts."""
    for name in torch_traceable._STAND_INS:
        monkeypatch.setitem(torch_traceable._STAND_INS, name, lambda self, x, *_: 2 * x)
    with pytest.raises(ModelError, match=r"torch\.export must be able to trace") as error:
        mlc.compile(Logits("dbrx").eval(), example_inputs=(_tokens(1),), log=False)
    assert "\n" not in str(error.value)


class Adapted(nn.Linear):
    """A layer with an adapter that has learnt little."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 1e-5)


@pytest.mark.parametrize("change", ["none", "adapter", "hook"])
def test_experts_that_their_weights_do_not_tell_are_left_alone(change: str) -> None:
    from transformers import AutoConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    torch.manual_seed(0)
    config = AutoConfig.for_model("switch_transformers", **_TOKENS, **CONFIGURATIONS["switch_transformers"])
    module = SwitchTransformersSparseMLP(config).eval()
    if change == "adapter":
        module.experts["expert_1"].wi = Adapted(32, 40, bias=False)
    elif change == "hook":
        module.experts["expert_1"].register_forward_hook(lambda _module, _inputs, result: result * (1 + 1e-5))
    with torch_traceable.traceable(module, (torch.randn(2, 7, 32),)):
        assert ("forward" in vars(module.experts)) == (change == "none")
