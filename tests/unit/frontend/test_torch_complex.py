"""Complex numbers inside of PyTorch's modules, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import mlc
from mlc.errors import ModelError
from mlc.frontend.torch_complex import in_reals


class Turned(nn.Module):
    """Pairs of numbers turned by an angle for each position, which is a buffer or computed."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.computed = computed
        angles = torch.outer(torch.arange(40.0), torch.tensor([1.0, 0.3, 0.1]))
        self.register_buffer("angles", angles)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        angles = self.angles[:length]
        turns = torch.polar(torch.ones_like(angles), angles) if self.computed else self.turns[:length]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)).transpose(1, 2)
        return torch.view_as_real(pairs * turns[None, None]).flatten(3).transpose(1, 2)


class Of(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(x, y)


def same(exe: mlc.Executable, module: nn.Module, *given: torch.Tensor) -> None:
    with torch.no_grad():
        wanted = module(*given).numpy()
    (got,) = exe(*(each.numpy() for each in given))
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype) and wanted.std() > 0.1
    assert wanted.dtype == bool or np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("computed", [True, False], ids=["computed", "a buffer"])
def test_positions_turn_pairs(computed: bool) -> None:
    module, x = Turned(computed), torch.randn(2, 7, 4, 6)
    same(mlc.compile(module, example_inputs=(x,), log=False), module, x)
    assert module.turns.is_complex()


@pytest.mark.parametrize("computed", [True, False], ids=["computed", "a buffer"])
def test_of_texts_of_any_length(computed: bool) -> None:
    module = Turned(computed)
    program = torch.export.export(module, (torch.randn(2, 7, 4, 6),),
                                  dynamic_shapes=({1: torch.export.Dim("n", min=1, max=40)},))
    exe = mlc.compile(program, log=False)
    for length in (1, 7, 40):
        same(exe, module, torch.randn(2, length, 4, 6))


@pytest.mark.parametrize("function", [
    lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.complex(y, x[:1])),
    lambda x, y: torch.view_as_real(torch.complex(x, y).conj() / (y.square() + 1)) * 2,
    lambda x, y: (torch.complex(x, y) - torch.complex(y, y) * 0.5).abs(),
    lambda x, y: torch.cat([torch.complex(x, y), -torch.complex(y, x)], -1).permute(1, 0).real,
    lambda x, y: torch.view_as_real((torch.complex(x, y) * (2 - 3j))[:, 1].unsqueeze(-1).expand(3, 5) * 1j),
    lambda x, y: torch.view_as_real(torch.complex(x, y).reshape(-1)[torch.tensor([3, 0, 5])].squeeze(-1)),
    lambda x, y: torch.view_as_real(y * 1j) + torch.view_as_real(x.to(torch.complex64) + torch.complex(x, y)),
    lambda x, y: torch.complex(x, y).to(torch.complex128).imag,
], ids=["products", "conjugates", "lengths", "joined", "constants", "chosen", "of reals", "wider"])
def test_operators_of_pairs(function: Callable[..., torch.Tensor]) -> None:
    module, x, y = Of(function), torch.randn(3, 4), torch.randn(3, 4)
    exe = mlc.compile(module, example_inputs=(x, y), log=False)
    same(exe, module, torch.randn(3, 4), torch.randn(3, 4))


class Weights(nn.Module):
    """Weights that are read as they are: parameters that are one, conjugates, wider ones, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.same = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("turned", torch.randn(4, dtype=torch.complex64).conj())
        self.register_buffer("negated", torch.randn(4, dtype=torch.complex64).conj().imag)
        self.constant = torch.randn(4, 1, dtype=torch.complex64).T

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x, y) * self.first + self.same * self.turned
        return torch.view_as_real(pairs * self.constant - self.turned * self.negated) * self.first.abs()[:, None]


def test_weights_are_used_as_they_are() -> None:
    """Without a slice or any other operator before a product."""
    module, x, y = Weights(), torch.randn(3, 4), torch.randn(3, 4)
    same(mlc.compile(module, example_inputs=(x, y), log=False), module, y, x)


@pytest.mark.parametrize("function", [
    lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.tensor(2.5, dtype=torch.float64)),
    lambda x, y: torch.view_as_real(torch.complex(x, y) / (y.double().square().sum() + 1) + x.double().sum() * 1j),
    lambda x, y: torch.complex(torch.zeros_like(x), torch.where(y > 0, y, 0)).to(torch.bool),
    lambda x, y: torch.view_as_real(torch.complex(x, y).t().mul(2j).t().view(-1)),
    lambda x, y: torch.view_as_real(torch.cat([torch.complex(x, y), x], -1)),
    lambda x, y: torch.view_as_real(torch.cat([torch.complex(x, y), torch.complex(x[:0, 0], y[:0, 0])])),
    lambda x, y: torch.view_as_real(torch.complex(x[0, 0], y[0, 0]).squeeze(-1).transpose(-1, 0) * x),
    lambda x, y: torch.complex(x, y).conj().imag + 1,
    lambda x, y: torch.view_as_real(torch.complex(x, y) + 1 - y + (2 - 1j) + torch.complex(y, x)[0].add(y, alpha=3)),
    lambda x, y: torch.complex(x * 1e30, y * 1e30).abs() / 1e30 + torch.complex(x * 1e-30, y * 1e-30).abs() * 1e30,
    lambda x, y: torch.complex(x * 0, y.clamp(0)).abs() + torch.complex(y, y).abs(),
], ids=["a wide number", "a wide sum", "truth", "another order in memory", "joined to reals", "joined to nothing",
        "without axes", "a conjugate's", "sums with reals", "large and small lengths", "lengths of nothing"])
def test_what_is_unlike_for_pairs(function: Callable[..., torch.Tensor]) -> None:
    """Types of numbers without axes, axes of numbers, orders in memory, and what squares cannot hold."""
    module, x, y = Of(function), torch.randn(3, 4), torch.randn(3, 4)
    exe = mlc.compile(module, example_inputs=(x, y), log=False)
    same(exe, module, y, x)


def test_operators_without_a_rule_are_left_to_the_exporter() -> None:
    """Which has Fourier transforms."""
    module = Of(lambda x, y: torch.view_as_real(torch.fft.rfft(x)) + torch.fft.rfft(y).abs()[..., None])
    x, y = torch.randn(3, 16), torch.randn(3, 16)
    program = torch.export.export(module, (x, y))
    assert in_reals(program, "m") is program
    same(mlc.compile(module, example_inputs=(x, y), log=False), module, y, x)


def test_a_program_without_complex_numbers_is_the_same() -> None:
    program = torch.export.export(Of(torch.add), (torch.randn(2), torch.randn(2)))
    assert in_reals(program, "m") is program


@pytest.mark.parametrize(("function", "x", "said"), [
    (lambda x, y: torch.complex(x, y), torch.randn(3), r"output \w+ is complex; give its real and imaginary parts out"),
    (lambda x, y: torch.view_as_real(x * y), torch.randn(3) + 1j, "input x is complex; take its real and imaginary"),
    (lambda x, y: torch.view_as_real(torch.add(torch.complex(x, y), torch.complex(y, x), alpha=2j)), torch.randn(3),
     "adds a complex multiple; multiply first"),
    (lambda x, y: torch.view_as_real(y / torch.complex(x, y)), torch.randn(3), "divides by complex numbers"),
], ids=["output", "input", "multiple", "quotient"])
def test_what_is_no_pair_is_refused_in_one_line(
    function: Callable[..., torch.Tensor], x: torch.Tensor, said: str
) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        mlc.compile(Of(function), example_inputs=(x, torch.randn(3)), log=False)
    assert "\n" not in str(caught.value)
