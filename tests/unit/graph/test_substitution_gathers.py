"""What is computed of rows of constant tables is computed when a model is compiled: from PyTorch's ONNX, at free sizes
too, compared with onnxruntime."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import mlc
from mlc.graph.substitute.check import difference, same_where_changed
from mlc.graph.substitute.choose import Decision
from mlc.substitution.terms import TermBuilder, TermGraph

WORDS = 400


class Factorised(nn.Module):
    """An embedding in few columns, and a projection to many (Lan et al., "ALBERT", 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.project = nn.Embedding(WORDS, 32), nn.Linear(32, 128)

    def forward(self, ids: torch.Tensor) -> Any:
        return torch.softmax(self.project(self.words(ids)), -2)


class Normed(nn.Module):
    """Words that are normalised before queries, keys and values are made of them, as in a decoder's first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, 64), nn.LayerNorm(64)
        self.project = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.words(ids)
        q, k, v = (project(self.norm(x)) for project in self.project)
        return x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v


class Pairs(nn.Module):
    """Users and items side by side (He et al., "Neural collaborative filtering", 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(WORDS, 32), nn.Embedding(WORDS // 2, 32)
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> Any:
        both = torch.cat([self.users(users), self.items(items)], -1)
        return torch.sigmoid(self.last(torch.relu(self.first(both))))


class Summed(nn.Module):
    """Words, places and kinds, whose sum is normalised before it is projected: nothing of it is of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds, self.norm = nn.Embedding(WORDS, 32), nn.Embedding(2, 32), nn.LayerNorm(32)
        self.project = nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> Any:
        return self.project(self.norm(self.words(ids) + self.kinds(kinds)))


def exported(module: nn.Module, *shape: int, free: bool = False) -> onnx.ModelProto:
    torch.manual_seed(0)
    names = ["ids", "kinds"][: 1 + isinstance(module, Pairs | Summed)]
    file = io.BytesIO()
    axes = {name: dict(enumerate("bs"[: len(shape)])) for name in names} if free else {}
    torch.onnx.export(module.eval(), tuple(torch.zeros(shape, dtype=torch.int64) for _ in names), file, dynamo=False,
                      input_names=names, output_names=["y"], dynamic_axes=axes)
    return onnx.load_from_string(file.getvalue())


def compiled(proto: onnx.ModelProto, **given: Any) -> tuple[mlc.Executable, Decision]:
    decisions: list[Decision] = []
    return mlc.compile(proto, log=False, on_decision=decisions.append, **given), decisions[0]


def run_time(graph: TermGraph) -> Counter[str]:
    """The operators that are left at run time."""
    constant = graph.constant_places()
    return Counter(term.op for place, term in enumerate(graph.terms) if place not in constant)


def assert_right(exe: mlc.Executable, proto: onnx.ModelProto, *shape: int) -> None:
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for seed in range(2):
        rng = np.random.default_rng(seed)
        most = {"ids": WORDS, "kinds": 2}
        given = {each.name: rng.integers(0, most[each.name], shape) for each in session.get_inputs()}
        for expected, found in zip(session.run(None, given), exe(*given.values()), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize(("module", "shape", "products"), [
    (Factorised, (2, 32), (1, 0)), (Normed, (2, 32), (5, 2)), (Pairs, (128,), (2, 1)),
])
def test_products_of_rows_of_tables_are_made_when_compiled(
    module: type[nn.Module], shape: tuple[int, ...], products: tuple[int, int]
) -> None:
    proto = exported(module(), *shape)
    exe, decision = compiled(proto)
    own, taken = (run_time(decision.found.candidates[place].graph) for place in (0, decision.chosen))
    assert (own["matmul"], taken["matmul"]) == products
    assert not taken["layer_norm"] and taken["gather"]
    assert_right(exe, proto, *shape)


@pytest.mark.parametrize(("module", "shape"), [(Factorised, (2, 8)), (Pairs, (8,))])
def test_rows_are_taken_of_the_product_at_every_size(module: type[nn.Module], shape: tuple[int, ...]) -> None:
    proto = exported(module(), *shape, free=True)
    names = [each.name for each in proto.graph.input]
    exe, decision = compiled(proto, shapes={name: ",".join(["1..24"] * len(shape)) for name in names})
    own, taken = (run_time(decision.found.candidates[place].graph) for place in (0, decision.chosen))
    assert taken["matmul"] == own["matmul"] - 1
    for sizes in ((1, 1), (3, 7), (24, 24)):
        assert_right(exe, proto, *sizes[: len(shape)])


def test_negative_indices_count_from_the_end() -> None:
    proto = exported(Factorised(), 2, 32)
    exe, decision = compiled(proto)
    assert decision.chosen
    ids = np.random.default_rng(0).integers(-WORDS, WORDS, (2, 32))
    [expected] = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"ids": ids})
    np.testing.assert_allclose(exe(ids)[0], expected, rtol=0, atol=1e-5)


def test_a_norm_of_a_sum_stays() -> None:
    proto = exported(Summed(), 2, 32)
    exe, decision = compiled(proto)
    taken = run_time(decision.found.candidates[decision.chosen].graph)
    assert taken["matmul"] == taken["layer_norm"] == 1
    assert_right(exe, proto, 2, 32)


def test_a_table_that_comes_when_the_model_runs_stays() -> None:
    """Its product has more rows than are taken."""
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 64)

        def forward(self, table: torch.Tensor, ids: torch.Tensor) -> Any:
            return self.project(table[ids])

    torch.manual_seed(0)
    file = io.BytesIO()
    table, ids = torch.randn(WORDS, 32), torch.arange(8)
    torch.onnx.export(Given().eval(), (table, ids), file, dynamo=False, input_names=["table", "ids"])
    exe, decision = compiled(onnx.load_from_string(file.getvalue()))
    products = [term for term in decision.found.candidates[decision.chosen].graph.terms if term.op == "matmul"]
    assert [term.shape for term in products] == [(8, 64)]
    [expected] = onnxruntime.InferenceSession(file.getvalue()).run(None, {"table": table.numpy(), "ids": ids.numpy()})
    np.testing.assert_allclose(exe(table.numpy(), ids.numpy())[0], expected, rtol=0, atol=1e-5)


def gathered(order: int) -> TermGraph:
    """Rows of a sum, or with ``order`` those of the reversed indices' halves."""
    build = TermBuilder()
    table, ids = build.add("input", (), (9, 3), id=0), build.add("opaque", (), (6,), id=0)
    if order:
        halves = [build.add("slice", (ids,), (3,), axis=0, begin=b, end=b + 3) for b in (3, 0)]
        ids = build.add("concat", halves, (6,), axis=0)
    return build.graph([build.add("gather", (table, ids), (6, 3), axis=0)])


def test_graphs_are_compared_at_indices_of_the_table() -> None:
    assert same_where_changed(gathered(0), gathered(0)) and difference(gathered(0), gathered(0)) == 0
    assert same_where_changed(gathered(0), gathered(1)) is False
    assert difference(gathered(0), gathered(1)) > 0.1
