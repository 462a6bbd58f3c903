"""What tests of the back end for PyTorch share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mlc


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch = pytest.importorskip("torch")

    from mlc import torch_backend

    torch_backend.register()
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture()
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[mlc.Executable]:
    """Gets what is really compiled."""
    made: list[mlc.Executable] = []
    compile_ = mlc.compile

    def counted(model: Any, **options: Any) -> mlc.Executable:
        exe = compile_(model, **options)
        made.append(exe)
        return exe

    monkeypatch.setattr(mlc, "compile", counted, raising=False)
    return made
