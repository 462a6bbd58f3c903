"""Python's numbers in exported programs: whole ones are divided as Python does, others are not rounded to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mlc
from mlc.errors import ModelError
from mlc.frontend.torch_numbers import with_exact_numbers


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self._function(*args)


def _exported(function: Callable[..., Any], *args: torch.Tensor) -> Any:
    with torch.no_grad():
        return torch.export.export(Calling(function), args)


def test_whole_numbers_are_divided_towards_minus_infinity() -> None:
    def function(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number = n.item()
        return x + number // 3, x + number // -3, x + number % 3, x + number % -3, x + (2 * number + 1) // 4

    x = torch.randn(3)
    program = _exported(function, torch.tensor(7), x)
    exe, graph = mlc.compile(program), str(program.graph)
    for number in (7, -7, 8, -1, 0):
        n = torch.tensor(number)
        for got, wanted in zip(exe(n.numpy(), x.numpy()), function(n, x), strict=True):
            np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-6)
    assert str(program.graph) == graph, "the user's program stays what it was"


def test_sizes_are_divided_as_they_were() -> None:
    rows = torch.export.Dim("half")
    program = torch.export.export(Calling(lambda x: x.reshape(x.shape[0] // 2, -1)), (torch.randn(8, 4),),
                                  dynamic_shapes={"args": ({0: 2 * rows},)})
    assert with_exact_numbers(program, "sizes") is program


def test_numbers_beside_float64_are_not_rounded() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x * 0.1, 0.1 - x, x / 0.3, x**1.1, torch.add(x, x, alpha=0.1), x.clamp(0.1, 0.7), x % 0.3,
            x.masked_fill(x > 0.7, 0.1), torch.full_like(x, 0.1) + x, F.leaky_relu(x - 1, 0.1), F.softplus(x, 0.1),
            F.layer_norm(x, (4,), eps=0.1), x * torch.arange(0.1, 0.45, 0.1, dtype=torch.float64), x * 1e200)

    x = torch.rand(3, 4, dtype=torch.float64) + 0.1
    for got, wanted in zip(mlc.compile(_exported(function, x))(x.numpy()), function(x), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-13)


def test_float32_is_left_as_it_is() -> None:
    program = _exported(lambda x: F.gelu(F.layer_norm(x * 0.1, (4,))), torch.randn(3, 4))
    assert with_exact_numbers(program, "single") is program


@pytest.mark.parametrize("function, what", [
    (lambda n, x: x * (n.item() / 3), "truediv"), (lambda n, x: F.pad(x, (1, 1), value=0.1) + n, "0.1 in aten.con")])
def test_numbers_that_cannot_be_exact_are_refused(function: Callable[..., Any], what: str) -> None:
    program = _exported(function, torch.tensor(7), torch.rand(3, 4, dtype=torch.float64))
    with pytest.raises(ModelError, match="beside tensors of float64 must be exact, but m has .*" + what) as caught:
        with_exact_numbers(program, "m")
    assert "\n" not in str(caught.value)
