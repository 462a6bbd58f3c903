"""What a generator takes from configurations, and what samplers and users ask of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from test_generator import CAPACITY, Decoder
from transformers import LlamaConfig, LlamaForCausalLM

import mlc
from mlc.errors import InputError, UsageError
from mlc.generator import _ends


@pytest.fixture(scope="module")
def generator() -> mlc.Generator:
    return mlc.Generator(Decoder().model(), capacity=CAPACITY, log=False)


def test_a_text_ends_as_the_files_beside_a_model_say(tmp_path: Path, generator: mlc.Generator) -> None:
    """And that is in what is saved, too."""
    path = tmp_path / "model.onnx"
    onnx.save(Decoder().model(), path)
    free = list(generator([3, 5, 8], 12))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": CAPACITY, "eos_token_id": free[0]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[4], free[5]]}))
    made = mlc.Generator(path, log=False)
    assert made.stop == {free[4], free[5]} and made.capacity == CAPACITY
    assert list(made([3, 5, 8], 12)) == free[:1 + next(i for i, token in enumerate(free) if token in made.stop)]
    assert list(made([3, 5, 8], 12, stop=())) == free
    made.save(tmp_path / "model.so")
    assert mlc.Generator(tmp_path / "model.so").stop == made.stop
    assert mlc.Generator(tmp_path / "model.so", stop=7).stop == {7}


@pytest.mark.parametrize(("said", "wanted"), [
    ({"config.json": {"eos_token_id": 7}}, [7]),
    ({"config.json": {"eos_token_id": None}}, []),
    ({"config.json": {"text_config": {"eos_token_id": [7, 9]}}}, [7, 9]),
    ({"genai_config.json": {"model": {"eos_token_id": 5, "context_length": 64}}}, [5]),
    ({"generation_config.json": {"eos_token_id": [1, 2]}, "config.json": {"eos_token_id": 7}}, [1, 2]),
    ({"config.json": "no JSON"}, []),
    ({}, []),
])
def test_files_say_by_which_tokens_a_text_ends(tmp_path: Path, said: dict[str, object], wanted: list[int]) -> None:
    for name, content in said.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert _ends(tmp_path / "model.onnx") == wanted


def test_modules_say_by_which_tokens_a_text_ends() -> None:
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=20,
                                         intermediate_size=32, eos_token_id=4))
    assert _ends(model) == [4]
    model.generation_config.eos_token_id = [3, 4]
    assert _ends(model) == [3, 4]
    assert _ends(torch.nn.Linear(2, 2)) == []


def test_tokens_that_were_said_are_less_likely_by_the_penalty() -> None:
    """As transformers' processor computes it."""
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(0)
    logits, said = rng.standard_normal((2, 30)).astype("float32") * 2, rng.integers(0, 30, (2, 9))
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.from_numpy(said), torch.from_numpy(logits)).numpy()
    sampler = mlc.Sampler(top_k=1, repetition_penalty=1.7)
    sampler.begin(said, np.array([9, 9]), 30)
    drawn = []
    for _ in range(6):  # what has been drawn counts as said
        drawn.append(sampler(logits))
        np.testing.assert_array_equal(drawn[-1], wanted.argmax(-1))
        said = np.concatenate([said, drawn[-1][:, None]], axis=1)
        wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.from_numpy(said), torch.from_numpy(logits)).numpy()
    assert len({tuple(each) for each in drawn}) > 1


def test_a_generator_tells_a_sampler_what_was_said(generator: mlc.Generator) -> None:
    prompt = [3, 5, 8]
    plain = list(generator(prompt, 12, mlc.Sampler(top_k=1)))
    assert plain == list(generator(prompt, 12))
    hard = list(generator(prompt, 12, mlc.Sampler(top_k=1, repetition_penalty=1e9)))
    assert len({*prompt, *hard}) == 15  # nothing twice while other tokens have logits above 0
    on = list(generator([hard[-1], 1], 6, sampler := mlc.Sampler(top_k=1, repetition_penalty=1e9)))
    more = list(generator([on[-1]], 6, sampler, resume=True))
    assert len({*on, *more}) == 12


def test_a_state_that_memory_has_no_room_for_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(UsageError, match=r"the keys and values of 1000000000 tokens must fit into memory, but take "
                                         r"256\.0 GB of .*such as capacity=\d+") as caught:
        mlc.Generator(Decoder().model(), capacity=10**9, log=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("prompt", "said"), [
    ("Once upon a time", "got str; give the input_ids of the model's tokeniser"),
    ({"input_ids": [[1, 2]]}, "got dict; give the input_ids of the model's tokeniser"),
    ([[1, 2], [3, 4]], "must have 1 sequences, got 2; make a generator with batch=2"),
    (torch.tensor([1.5, 2.0]), "must be whole numbers"),
])
def test_prompts_that_are_no_token_ids_are_refused_in_one_line(
    generator: mlc.Generator, prompt: object, said: str
) -> None:
    with pytest.raises(InputError) as caught:
        generator(prompt, 2)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_of_torch_are_prompts(generator: mlc.Generator) -> None:
    wanted = list(generator([3, 5, 8], 4))
    assert list(generator(torch.tensor([3, 5, 8]), 4)) == wanted
    assert [int(each[0]) for each in generator(torch.tensor([[3, 5, 8]]), 4)] == wanted


def test_a_precision_is_the_compilers(generator: mlc.Generator) -> None:
    """Weights of 16 bits round the logits a little."""
    ids = [[3, 5, 8, 13, 21]]
    generator.reset()
    wanted = generator.logits(ids)
    found = mlc.Generator(Decoder().model(), capacity=CAPACITY, log=False, precision="f16").logits(ids)
    assert 1e-6 < np.abs(found - wanted).max() / np.abs(wanted).max() <= 1e-2
    with pytest.raises(UsageError, match="precision must be"):
        mlc.Generator(Decoder().model(), capacity=CAPACITY, log=False, precision="f8")
