"""Attention of free sizes: what is made for fixed ones is found."""

from __future__ import annotations

import pytest
from relax_evaluation import module, operators
from tvm.script import relax as R

from mlc.compilation import Compilation
from mlc.graph.lowering.attention import FuseAttention
from mlc.networks.models import bert_base
from mlc.target import resolve


@pytest.mark.parametrize("target", ["x86-64-v3", "cuda:sm_80"])
def test_projections_of_a_free_number_of_tokens_become_one(target: str) -> None:
    """Their heads lie apart whatever the batch and the length are."""
    model = bert_base(free=True, num_hidden_layers=1, hidden_size=64, num_attention_heads=4, intermediate_size=128,
                      vocab_size=200)
    tasks = Compilation.of(model, target, substitutions=False).lowered().tasks
    products = [task for task in tasks if "matmul" in task.name or "dense" in task.name]
    assert sum(task.weight for task in products) == 5, "projections, what follows attention, two products, and a pooler"
    assert [task.weight for task in tasks if task.name == "attention"] == [1]


def test_weights_that_are_no_numbers_are_zeros_on_gpus_too() -> None:
    """As exporters write it for queries that a mask hides all keys from."""
    @R.function(private=True)
    def before(
        q: R.Tensor((1, 2, 9, 8), "float32"), k: R.Tensor((1, 2, 8, 12), "float32"),
        v: R.Tensor((1, 2, 12, 16), "float32"), m: R.Tensor((1, 1, 9, 12), "float32"),
    ):
        with R.dataflow():
            w = R.nn.softmax(R.add(R.matmul(q, k), m), axis=-1)
            y = R.matmul(R.where(R.isnan(w), R.const(0.0, "float32"), w), v)
            R.output(y)
        return y

    assert operators(FuseAttention(resolve("cuda:sm_80"))(module(before))) == ["call_tir"]
