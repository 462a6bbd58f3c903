"""Families of language models of transformers: each step's logits are those of eager PyTorch for all tokens at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mlc
from mlc.errors import MlcError, UsageError

CAPACITY, VOCABULARY, WINDOW = 48, 97, 8
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
         "vocab_size": VOCABULARY, "max_position_embeddings": CAPACITY, **NO_TOKENS}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
SLIDING = {**GROUPED, "sliding_window": WINDOW}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
           "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {**SIZES, **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
          "qk_nope_head_dim": 16, "v_head_dim": 16}
OLD = {"n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8, "vocab_size": VOCABULARY, "n_positions": CAPACITY,
       "n_ctx": CAPACITY, **NO_TOKENS}

#: model type and settings; of each kind (window, experts, latent keys, one table of positions...) one among the first
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": SLIDING,
    "gemma": GROUPED,
    "gpt_neox": {**SIZES, "rotary_pct": 0.25},
    "granite": {**GROUPED, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "olmo": GROUPED,
    "stablelm": GROUPED,
    "glm": GROUPED,
    "ernie4_5": GROUPED,
    "qwen3_moe": {**GROUPED, **EXPERTS},
    "mixtral": {**SLIDING, **EXPERTS},
    "granitemoe": {**GROUPED, **EXPERTS},
    "olmoe": {**GROUPED, **EXPERTS},
    "qwen2_moe": {**GROUPED, **EXPERTS},
    "phimoe": {**GROUPED, **EXPERTS},
    "glm4_moe": {**GROUPED, **EXPERTS},
    "ernie4_5_moe": {**GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
                     "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_num_shared_experts": 1},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "gemma2": {**MIXED, "query_pre_attn_scalar": 16},
    "cohere2": MIXED,
    "olmo3": MIXED,
    "exaone4": MIXED,
    "gemma4_text": MIXED,
    "starcoder2": SLIDING,
    "qwen2": {**SLIDING, "use_sliding_window": True, "max_window_layers": 1},
    "deepseek_v3": LATENT,
    "deepseek_v2": LATENT,
    "gpt_oss": {**MIXED, **EXPERTS},
    "llama4_text": {**GROUPED, **EXPERTS, "intermediate_size_mlp": 96, "attention_chunk_size": WINDOW,
                    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0],
                    "attn_temperature_tuning": True, "floor_scale": 4},
    "qwen3": GROUPED,
    "phi3": {**SLIDING, "original_max_position_embeddings": CAPACITY},
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
    "cohere": GROUPED,
    "mpt": {"n_layers": 2, "d_model": 64, "n_heads": 4, "expansion_ratio": 2, "vocab_size": VOCABULARY,
            "max_seq_len": CAPACITY, **NO_TOKENS},
    "bloom": {"n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": VOCABULARY, **NO_TOKENS},
    "falcon": {**SIZES, "multi_query": True},
    "gpt_neo": {**SIZES, "num_layers": 2, "num_heads": 4, "window_size": WINDOW,
                "attention_types": [[["global", "local"], 1]]},
    "gptj": OLD,
    "codegen": OLD,
    "gpt_bigcode": OLD,
    "opt": {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1},
    "phi": SIZES,
    "olmo2": GROUPED,
    "glm4": GROUPED,
    "biogpt": {**SIZES, "pad_token_id": 1},
    "xglm": {"num_layers": 2, "d_model": 64, "ffn_dim": 96, "attention_heads": 4, "vocab_size": VOCABULARY,
             "max_position_embeddings": CAPACITY, **NO_TOKENS, "pad_token_id": 1},
    "nemotron": GROUPED,
}


def made(family: str, **settings: Any) -> torch.nn.Module:
    """A model of the family with random weights of which none is without effect."""
    settings = {**FAMILIES.get(family, {}), **settings}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    draw = torch.Generator().manual_seed(0)
    tied = getattr(model.config, "tie_word_embeddings", False)  # then the likeliest token is mostly the last one
    for weight in model.parameters():
        drawn = torch.randn(weight.shape, generator=draw)
        scale = (2.5 if tied else 1.2) / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.2
        weight.data = (drawn * scale + (weight.data if weight.dim() == 1 else 0)).to(weight.dtype)
    for name, table in model.named_buffers():
        if "correction_bias" in name:
            table.data = torch.randn(table.shape, generator=draw) * 0.2
    return model


def eager(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(ids)).logits.float())


def generated(model: torch.nn.Module, prompt: np.ndarray, count: int) -> list[int]:
    ids = torch.from_numpy(prompt)[None]
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                           pad_token_id=0)
    return list(whole[0, len(prompt):].tolist())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_generates_what_it_does_eagerly(family: str) -> None:
    model = made(family)
    generator = mlc.Generator(model, capacity=CAPACITY, log=False)
    rng = np.random.default_rng(0)
    for width in (1, 5, 2 * WINDOW + 3):
        prompt = rng.integers(2, VOCABULARY, width)
        wanted = generated(model, prompt, 12)
        assert list(generator(prompt, 12)) == wanted
        generator.reset()
        steps = [generator.logits([prompt]), *(generator.logits([[token]]) for token in wanted)]
        whole = eager(model, np.concatenate([prompt, wanted])[None])
        np.testing.assert_allclose(np.concatenate(steps, axis=1), whole, rtol=0, atol=1e-4 * np.abs(whole).max())
    more = rng.integers(2, VOCABULARY, 3)
    list(generator(prompt, 12))
    assert list(generator([wanted[-1], *more], 4, resume=True)) == generated(
        model, np.concatenate([prompt, wanted, more]), 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["opt", "bloom", "llama4_text"])
def test_shorter_sequences_of_a_batch_generate_what_they_do_padded_eagerly(family: str) -> None:
    """Positions that a table, distances and chunks tell."""
    model, rng = made(family), np.random.default_rng(0)
    generator = mlc.Generator(model, capacity=CAPACITY, batch=2, log=False)
    long, short = rng.integers(2, VOCABULARY, 15), rng.integers(2, VOCABULARY, 4)
    ids = torch.from_numpy(np.stack([long, np.concatenate([np.zeros(11, np.int64), short])]))
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0)[:, 15:]
    np.testing.assert_array_equal(np.transpose(list(generator([long, short], 10))), wanted)


def test_keys_are_turned_anew_where_a_long_text_has_other_angles(tmp_path: Path) -> None:
    """As Phi-3 of 128k tokens has from 4k tokens on."""
    turn = 16
    angles = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1 + i / 2 for i in range(8)],
              "original_max_position_embeddings": turn, "rope_theta": 100.0}
    model = made("phi3", **{**GROUPED, "original_max_position_embeddings": turn, "rope_parameters": angles})
    mlc.Generator(model, capacity=CAPACITY, log=False).save(tmp_path / "phi3.so")
    generator = mlc.Generator(tmp_path / "phi3.so")
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 30))
    for ends in ((5, 16, 17, 18, 30), (16, 30), (12, 20, 21), (17, 18)):
        generator.reset()
        begin = 0
        for end in ends:
            found, whole = generator.logits(ids[:, begin:end]), eager(model, ids[:, :end])[:, begin:]
            np.testing.assert_allclose(found, whole, rtol=0, atol=1e-4 * np.abs(whole).max())
            begin = end
    prompt = ids[0, :10]
    assert list(generator(prompt, 12)) == generated(model, prompt, 12)


@pytest.mark.slow
def test_angles_that_follow_the_length_are_those_of_short_texts_up_to_the_capacity() -> None:
    angles = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    model = made("llama", **{**GROUPED, "max_position_embeddings": 20, "rope_parameters": angles})
    longer, ids = eager(model, np.ones((1, 30), np.int64)), np.random.default_rng(0).integers(0, VOCABULARY, (1, 19))
    with pytest.raises(UsageError, match=r"beyond 20 tokens .*; give capacity=20, or less"):
        mlc.Generator(model, capacity=21)
    generator = mlc.Generator(model, log=False)
    found = np.concatenate([generator.logits(part) for part in np.split(ids, [7, 8], axis=1)], axis=1)
    whole = eager(model, ids)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-4 * np.abs(whole).max())
    np.testing.assert_array_equal(eager(model, np.ones((1, 30), np.int64)), longer)  # the module is as it was


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_16_bits_keep_keys_and_values_of_16_bits(dtype: str) -> None:
    model = made("llama", **GROUPED).to(getattr(torch, dtype))
    generator = mlc.Generator(model, capacity=CAPACITY, log=False)
    assert {str(rows.dtype) for rows in generator._rows.values()} == {dtype}
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (1, 20))
    steps = [generator.logits(part) for part in np.split(ids, [11, 12, 13], axis=1)]
    whole = eager(model.float(), ids)  # the weights are of 16 bits, the rest is exact
    np.testing.assert_allclose(np.concatenate(steps, axis=1).astype("float32"), whole, rtol=0,
                               atol=(5e-2 if dtype == "bfloat16" else 8e-3) * np.abs(whole).max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "settings", "said"), [
    ("mamba", {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": VOCABULARY, "state_size": 8},
     "layer 0 of MambaForCausalLM has a LinearAttentionLayer"),
    ("falcon_h1", {**SIZES, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128,
                   "mamba_d_state": 8}, "has a LinearAttentionAndFullAttentionLayer"),
    ("openai-gpt", {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY},
     "must take the keys and values of former tokens (past_key_values), but OpenAIGPTLMHeadModel does not"),
], ids=lambda each: each if isinstance(each, str) and " " not in each else "")
def test_what_keeps_anything_but_keys_and_values_is_refused_in_one_line(
    family: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(MlcError) as caught:
        mlc.Generator(made(family, **settings), capacity=CAPACITY)
    assert said in str(caught.value) and "\n" not in str(caught.value) and "mlc.compile" in str(caught.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "said"), [
    ("LlamaModel", "must give logits for each token, but LlamaModel does not"),
    ("LlamaForSequenceClassification", "must give logits for each token, but LlamaForSequenceClassification does not"),
    ("T5ForConditionalGeneration", "T5ForConditionalGeneration has an encoder too"),
    ("WhisperForConditionalGeneration", "WhisperForConditionalGeneration has an encoder too"),
    ("BertForMaskedLM", "(past_key_values), but BertForMaskedLM does not"),
])
def test_what_is_no_causal_language_model_is_named_in_one_line(kind: str, said: str) -> None:
    import transformers

    sizes = {"Llama": GROUPED, "Bert": {**SIZES, "pad_token_id": 0}, "T5": {
        "num_layers": 1, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": VOCABULARY},
        "Whisper": {"encoder_layers": 1, "decoder_layers": 1, "d_model": 64, "encoder_attention_heads": 4,
                    "decoder_attention_heads": 4, "vocab_size": VOCABULARY, "pad_token_id": 0}}
    stem = next(each for each in sizes if kind.startswith(each))
    config = getattr(transformers, f"{stem}Config")(**sizes[stem])
    with pytest.raises(MlcError) as caught:
        mlc.Generator(getattr(transformers, kind)(config), capacity=CAPACITY)
    assert said in str(caught.value) and "\n" not in str(caught.value)
