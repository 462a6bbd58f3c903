"""A function compiled by ``torch.compile(backend="mlc")``, and whether it computes what eager PyTorch does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


def run(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """What the compiled function returns, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = torch.compile(function, backend="mlc", **options)(*args)
    return result, [str(w.message) for w in caught if "runs eagerly" in str(w.message)]


def check(got: Any, wanted: Any, rtol: float = 1e-4) -> None:
    got, wanted = (torch.utils._pytree.tree_leaves(each) for each in (got, wanted))
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
            scale = float(other.abs().max()) if other.is_floating_point() and other.numel() else 1.0
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * scale)
