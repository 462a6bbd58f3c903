"""Triangular systems of PyTorch against its own solver in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mlc
from mlc.errors import MlcError


class Solved(nn.Module):
    def __init__(self, upper: bool, left: bool, unitriangular: bool) -> None:
        super().__init__()
        self.upper, self.left, self.unitriangular = upper, left, unitriangular

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(a, b, upper=self.upper, left=self.left, unitriangular=self.unitriangular)


@pytest.mark.parametrize(("size", "upper", "left", "unitriangular"), [
    (1, True, True, True), (1, False, True, False), (5, True, False, False), (7, False, True, False),
    (8, True, True, True), (13, False, False, True), (64, False, True, True),
])
def test_systems_are_solved(size: int, upper: bool, left: bool, unitriangular: bool) -> None:
    drawn = torch.Generator().manual_seed(size)
    a = torch.randn(2, 3, size, size, generator=drawn) * 0.3 + 2 * torch.eye(size)  # the other triangle is not read
    b = torch.randn(3, *((size, 4) if left else (4, size)), generator=drawn)
    module = Solved(upper, left, unitriangular)
    wanted = module(a.double(), b.double())
    (found,) = mlc.compile(module.eval(), example_inputs=(a, b), log=False)(a.numpy(), b.numpy())
    assert found.shape == wanted.shape and found.dtype == "float32"
    torch.testing.assert_close(torch.from_numpy(found).double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_free_size_is_refused() -> None:
    size = torch.export.Dim("size", min=2, max=9)
    given = (torch.eye(4) + 1, torch.ones(4, 2))
    program = torch.export.export(Solved(False, True, False), given, dynamic_shapes=({0: size, 1: size}, {0: size}))
    with pytest.raises(MlcError) as caught:
        mlc.compile(program, log=False)
    assert str(caught.value) == ("torch.onnx must be able to export ExportedProgram, but: the matrix of a triangular "
                                 "system must have a fixed size")
