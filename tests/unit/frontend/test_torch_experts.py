"""Mixtures of experts of transformers with random weights, and what they are made of, against eager PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mlc
from mlc.errors import ModelError

SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False, "num_experts_per_tok": 2,
}
ROUTED: dict[str, Any] = {"moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
                          "topk_group": 1, "head_dim": 8, "first_k_dense_replace": 0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "head_dim": 8},
    "olmoe": {"num_experts": 6},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
    "deepseek_v3": {**ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8},
    "deepseek_v2": {**ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8},  # positions turn complex numbers
    "glm4_moe": ROUTED,
    "granitemoe": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
                     "moe_layer_start_index": 0},
    "minimax": {"num_local_experts": 4, "head_dim": 8},
    "jamba": {"num_hidden_layers": 2, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
}


class Logits(nn.Module):
    """A language model of transformers as a function of tokens alone."""

    def __init__(self, name: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SMALL, **CONFIGURATIONS[name]}))
        for weight in self.model.parameters():  # as they are drawn, logits hardly depend on the tokens
            nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 3.0 / weight.shape[-1] ** 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_experts_are_chosen_by_the_tokens(name: str) -> None:
    module = Logits(name).eval()
    rng = torch.Generator().manual_seed(1)
    first, second = (torch.randint(0, 99, (2, 7), generator=rng) for _ in range(2))
    exe = mlc.compile(module, example_inputs=(first,), log=False)
    for ids in (first, second):
        with torch.no_grad():
            wanted = module(ids).numpy()
        np.testing.assert_allclose(exe(ids.numpy())[0], wanted, atol=1e-5 * np.abs(wanted).max(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "gpt_oss", "deepseek_v2"])
def test_experts_of_texts_of_any_length(name: str) -> None:
    module = Logits(name).eval()
    program = torch.export.export(module, (torch.randint(0, 99, (2, 7)),),
                                  dynamic_shapes=({1: torch.export.Dim("n", min=1, max=24)},))
    exe = mlc.compile(program, log=False)
    for length in (7, 1, 2, 13, 24):
        ids = torch.randint(0, 99, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            wanted = module(ids).numpy()
        np.testing.assert_allclose(exe(ids.numpy())[0], wanted, atol=1e-5 * np.abs(wanted).max(), rtol=1e-5)


@pytest.mark.filterwarnings("error::UserWarning")
def test_differences_of_a_free_number_of_elements() -> None:
    """Of a concatenation of one and ``n`` elements two windows are read."""
    class Differences(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.diff(x, prepend=x[:, :1] - 1) != 1).long()

    rng = np.random.default_rng(3)
    program = torch.export.export(Differences(), (torch.arange(14).reshape(2, 7),),
                                  dynamic_shapes=({1: torch.export.Dim("n", min=2, max=24)},))
    exe = mlc.compile(program, log=False)
    for length in (2, 7, 24):
        x = np.sort(rng.integers(0, 2 * length, (2, length)))
        wanted = Differences()(torch.from_numpy(x)).numpy()
        np.testing.assert_array_equal(exe(x)[0], wanted)
        assert wanted.any() or length == 2


@pytest.mark.sampled(5)
@pytest.mark.parametrize("bins", [60, 1, 2, 7, 128])
def test_a_histogram_counts_as_pytorch_does(bins: int) -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(x, bins=bins, min=0, max=max(1, bins - 1))

    numbers = torch.cat([torch.arange(-2, bins + 3).repeat(3), torch.randint(0, bins, (50,))]).float()
    exe = mlc.compile(Counts(), example_inputs=(numbers,), log=False)
    np.testing.assert_array_equal(exe(numbers.numpy())[0], Counts()(numbers).numpy())


@pytest.mark.parametrize("numbers", [torch.arange(9.0) ** 2 / 7, torch.full((5,), 3.0)], ids=["several", "equal"])
def test_a_histogram_from_the_least_number_to_the_largest(numbers: torch.Tensor) -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(x, bins=4)

    exe = mlc.compile(Counts(), example_inputs=(numbers,), log=False)
    np.testing.assert_array_equal(exe(numbers.numpy())[0], Counts()(numbers).numpy())


def test_grouped_products_of_pytorch() -> None:
    """Which it traces for bfloat16 alone."""
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 24, 16).bfloat16())

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x.bfloat16(), self.weight.transpose(-2, -1), offs=ends).float()

    torch.manual_seed(0)
    module, x, ends = Grouped(), torch.randn(18, 16), torch.tensor([5, 5, 11, 18], dtype=torch.int32)
    exe = mlc.compile(module, example_inputs=(x, ends), log=False)
    (got,), begin = exe(x.numpy(), ends.numpy()), 0
    for end, weight in zip(ends.tolist(), module.weight.detach().double(), strict=True):
        wanted = (x[begin:end].bfloat16().double() @ weight.T).numpy()
        np.testing.assert_allclose(got[begin:end], wanted, rtol=2e-2, atol=2e-2)
        begin = end


def test_a_length_that_data_decides_is_refused_in_one_line() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bincount(x)

    with pytest.raises(ModelError) as error:
        mlc.compile(Counts(), example_inputs=(torch.arange(4),), log=False)
    assert "\n" not in str(error.value)


def test_whole_numbers_are_divided_and_truths_compared_as_by_pytorch() -> None:
    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x // 2, (x < 0) == (x > 3), (x < 0) != (x > -5)

    x = torch.arange(-9, 10)
    exe = mlc.compile(Whole(), example_inputs=(x,), log=False)
    for got, wanted in zip(exe(x.numpy()), Whole()(x), strict=True):
        np.testing.assert_array_equal(got, wanted.numpy())


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_free_number_of_elements_is_sorted_whole() -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, order = torch.sort(x.reshape(-1))
            return values, order

    example = torch.randint(0, 5, (7, 2))
    rows = {0: torch.export.Dim("rows", min=1, max=40)}
    exe = mlc.compile(torch.export.export(Sorted(), (example,), dynamic_shapes=(rows,)), log=False)
    for count in (1, 7, 40):
        x = np.random.default_rng(count).integers(0, 5, (count, 2))
        values, order = exe(x)
        np.testing.assert_array_equal(order, np.argsort(x.reshape(-1), kind="stable"))
        np.testing.assert_array_equal(values, np.sort(x.reshape(-1)))
