"""Language models of transformers with random weights: what they generate is what eager PyTorch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import mlc
from mlc.errors import UsageError

CAPACITY, VOCABULARY = 40, 97


def gpt2() -> torch.nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=CAPACITY,
                                      bos_token_id=None, eos_token_id=None))


def llama() -> torch.nn.Module:
    return LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=CAPACITY, bos_token_id=None, eos_token_id=None))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_model_of_transformers_generates_what_it_does_eagerly(make):
    torch.manual_seed(0)
    model = make().eval()
    for weight in model.parameters():  # as they are drawn, logits hardly depend on the tokens
        weight.data.mul_(3.0 if weight.dim() > 1 else 1.0)
    generator = mlc.Generator(model, log=False)
    assert (generator.capacity, generator.vocabulary) == (CAPACITY, VOCABULARY)
    rng = np.random.default_rng(0)
    for width in (1, 7, CAPACITY):
        ids = rng.integers(0, VOCABULARY, (1, width))
        generator.reset()
        with torch.no_grad():
            wanted = model(torch.from_numpy(ids)).logits.numpy()
        np.testing.assert_allclose(generator.logits(ids), wanted, rtol=1e-4, atol=1e-4)
    prompt = rng.integers(0, VOCABULARY, 5)
    whole = model.generate(torch.from_numpy(prompt)[None], max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert list(generator(prompt, 20)) == whole[0, 5:].tolist()


def test_a_module_that_is_no_language_model_is_refused_in_one_line():
    with pytest.raises(UsageError, match="must be a causal language model of transformers, got Linear"):
        mlc.Generator(torch.nn.Linear(3, 3), capacity=8)
