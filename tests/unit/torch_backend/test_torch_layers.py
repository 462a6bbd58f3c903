"""Layers of ``torch.nn`` that Dynamo does not trace into: recurrent ones, and the fused one of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_runs import check, run  # noqa: E402

import mlc  # noqa: E402


class Recurrent(nn.Module):
    """A recurrent layer behind another; all that it returns."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.rand(layer.input_size))

    def forward(self, x: torch.Tensor, *states: Any) -> Any:
        return self.layer(x * self.scale, *states)


@pytest.mark.parametrize("layer, states", [
    (lambda: nn.LSTM(6, 8), 2),
    (lambda: nn.RNN(6, 8, nonlinearity="relu", bias=False), 0),
    *(pytest.param(layer, states, marks=pytest.mark.slow) for layer, states in (
        (lambda: nn.GRU(6, 8, bidirectional=True), 1),
        (lambda: nn.GRU(6, 8, 2, dropout=0.5, batch_first=True), 0),
        (lambda: nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True), 0),
        (lambda: nn.LSTM(6, 8, bias=False), 0),
        (lambda: nn.RNN(6, 8, 2, bidirectional=True), 1))),
])
def test_recurrent_layers_are_compiled(
    layer: Callable[[], nn.RNNBase], states: int, compiled: list[mlc.Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as one operator over its steps, by PyTorch's way through ONNX."""
    from mlc.frontend import pytorch

    kinds: list[str] = []
    to_onnx = pytorch.to_onnx

    def seen(program: Any, name: str) -> Any:
        made = to_onnx(program, name)
        kinds.extend(node.op_type for node in made.graph.node)
        return made

    monkeypatch.setattr(pytorch, "to_onnx", seen)
    model = Recurrent(layer()).eval()
    of = model.layer
    given = [torch.randn(of.num_layers * (2 if of.bidirectional else 1), 2, 8) for _ in range(states)]
    x = torch.randn(2, 18, 6) if of.batch_first else torch.randn(18, 2, 6)
    args = (x, tuple(given) if states > 1 else given[0]) if states else (x,)
    got, eagerly = run(model, *args, fullgraph=True)
    check(got, model(*args))
    assert not eagerly and len(compiled) == 1
    assert kinds.count(of.mode.split("_")[0]) == of.num_layers and "MatMul" not in kinds


class _Packed(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        seen, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return torch.relu(self.out(seen))


def test_a_packed_sequence_runs_eagerly_and_that_is_said_once() -> None:
    module, x = _Packed().eval(), torch.randn(3, 5, 6)
    with torch.inference_mode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function = torch.compile(module, backend="mlc")
        for lengths in (torch.tensor([5, 3, 2]), torch.tensor([5, 4, 1])):
            torch.testing.assert_close(function(x, lengths), module(x, lengths), rtol=1e-4, atol=1e-5)
    said = [str(each.message) for each in caught if "runs eagerly" in str(each.message)]
    assert len(said) == 1 and said[0].startswith("GRU(6, 8, batch_first=True) runs eagerly: ") and "packed" in said[0]


def test_recurrent_layers_of_free_steps(compiled: list[mlc.Executable]) -> None:
    model = nn.GRU(4, 8)
    fast = torch.compile(model, backend="mlc")
    for steps in (19, 2, 40):
        x = torch.randn(steps, 2, 4)
        torch._dynamo.mark_dynamic(x, 0)
        check(fast(x), model(x))
    assert len(compiled) == 1 and compiled[0].inputs[0].free


def test_recurrent_layers_of_other_backends_stay_theirs() -> None:
    captured: list[Any] = []

    def other(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        captured.append(graph)
        return graph.forward

    model, x = nn.LSTM(4, 8), torch.randn(3, 2, 4)
    check(torch.compile(model, backend=other)(x), model(x))
    assert not captured and not torch._dynamo.config.allow_rnn


def test_recurrent_layers_learn_eagerly(compiled: list[mlc.Executable]) -> None:
    model, x = nn.GRU(4, 8), torch.randn(3, 2, 4)
    with torch.enable_grad():
        fast = torch.compile(model, backend="mlc")
        with pytest.warns(UserWarning, match=r"^GRU\(4, 8\) runs eagerly: .*call it under torch.infer") as caught:
            got = [fast(x) for _ in range(2)][-1]
        got[0].sum().backward()
        wanted = torch.autograd.grad(model(x)[0].sum(), model.weight_hh_l0)[0]
    torch.testing.assert_close(model.weight_hh_l0.grad, wanted)
    assert not compiled and len(caught) == 1


def test_recurrent_layers_that_drop_elements_run_eagerly(compiled: list[mlc.Executable]) -> None:
    fast, x = torch.compile(nn.LSTM(4, 8, 2, dropout=0.5), backend="mlc"), torch.randn(3, 2, 4)
    with pytest.warns(UserWarning, match=r"^LSTM\(.*\) runs eagerly: .* drops elements at random") as caught:
        assert not torch.equal(fast(x)[0], fast(x)[0])
    assert not compiled and len(caught) == 1


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_layer_of_transformers(norm_first: bool) -> None:
    """In inference PyTorch calls one operator for the whole layer, which nothing else knows."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first, activation="gelu").eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 16)
    got, eagerly = run(layer, x)
    check(got, layer(x))
    assert not eagerly


@pytest.mark.parametrize("masks", [("pad",), ("pairs",), ("pad", "pairs")], ids="-".join)
def test_the_fused_layer_of_transformers_with_masks(masks: tuple[str, ...]) -> None:
    """Of the places behind a sequence's end, of pairs of places, and of both."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    pad, pairs = torch.zeros(2, 5, dtype=torch.bool), torch.ones(5, 5).triu(1).bool()
    pad[1, 3:] = True
    given = {"src_key_padding_mask": pad if "pad" in masks else None, "src_mask": pairs if "pairs" in masks else None}
    x = torch.randn(2, 5, 16)
    got, eagerly = run(lambda x: layer(x, **given), x)
    check(got, layer(x, **given))
    assert not eagerly and not torch.allclose(got, layer(x), rtol=1e-2), "masks must tell"
