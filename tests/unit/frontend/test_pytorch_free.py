"""Programs of torch.export whose dimensions are free: every size of the ranges, against PyTorch itself."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.nn import functional as F

import mlc
from mlc.errors import InputError, ModelError, UsageError
from mlc.frontend import load_model
from mlc.shapes import Free, Linear, Range


class Tokens(nn.Module):
    """An encoder layer over embeddings: batch and length are free, heads and widths are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        q, k, v = (f(x).view(*ids.shape, 4, 8).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.norm(x + attended), attended.mean(1)


class Pairs(nn.Module):
    """The second input has two rows for each of the first."""

    def forward(self, x: Any, y: Any) -> Any:
        return torch.cat([x, y]), y.view(x.shape[0], 2, -1).sum(1) + x


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, image: Any) -> Any:
        return self.head(F.relu(self.norm(self.conv(image))).mean((2, 3)))


def _same(exe: Any, module: nn.Module, *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        expected = module(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for ours, theirs in zip(exe(*(each.numpy() for each in inputs)), expected, strict=True):
        assert ours.shape == tuple(theirs.shape)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_named_and_bounded_dimensions() -> None:
    torch.manual_seed(0)
    module = Tokens().eval()
    dims = {"ids": {0: Dim("batch", max=6), 1: Dim("length", min=3, max=40)}}
    program = export(module, (torch.randint(0, 50, (2, 7)),), dynamic_shapes=dims)
    exe = mlc.compile(program, log=False)
    assert [size.range for size in exe.inputs[0].shape] == [Range(1, 6), Range(3, 40)]
    rng = np.random.default_rng(0)
    sizes = [(1, 3), (6, 40), (1, 40), (6, 3), *zip(rng.integers(1, 7, 6), rng.integers(3, 41, 6), strict=True)]
    for batch, length in sizes:
        _same(exe, module, torch.randint(0, 50, (int(batch), int(length))))
    with pytest.raises(InputError, match=r"ids must have a shape in \[1\.\.6,3\.\.40\], got \[2, 41\]"):
        exe(np.zeros((2, 41), np.int64))


def test_dimensions_that_follow_from_others() -> None:
    program = export(Pairs(), (torch.randn(4, 6), torch.randn(8, 6)),
                     dynamic_shapes={"x": {0: (rows := Dim("rows", max=33))}, "y": {0: 2 * rows}})
    exe = mlc.compile(program, log=False)
    (own, follows) = (spec.shape[0] for spec in exe.inputs)
    assert isinstance(own, Free) and isinstance(follows, Free)
    assert (own.range, follows.range, follows.usual) == (Range(1, 33), Range(2, 66), 2 * own.usual)
    for rows in (1, 2, 13, 33):
        _same(exe, Pairs(), torch.randn(rows, 6), torch.randn(2 * rows, 6))
    with pytest.raises(InputError, match=r"inputs must agree on .* is 3 in x and this is 5 in y, not 6") as caught:
        exe(np.zeros((3, 6), "f4"), np.zeros((5, 6), "f4"))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_height_and_width() -> None:
    torch.manual_seed(1)
    module = Image().eval()
    program = export(module, (torch.randn(1, 3, 20, 24),),
                     dynamic_shapes={"image": {2: Dim("height", min=8, max=64), 3: Dim("width", min=8, max=64)}})
    exe = mlc.compile(program, log=False)
    for size in ((8, 8), (64, 64), (9, 61), (31, 33)):
        _same(exe, module, torch.randn(1, 3, *size))


def test_without_an_end_the_default_range_ends() -> None:
    program = export(Image().eval(), (torch.randn(2, 3, 8, 8),), dynamic_shapes={"image": {0: Dim.DYNAMIC}})
    (batch, *_) = load_model(program).inputs[0].shape
    assert isinstance(batch, Free) and batch.range == mlc.shapes.DEFAULT_RANGE


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_16_bits(dtype: torch.dtype) -> None:
    """Of which a kernel is chosen by the number of rows."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48).to(dtype)
    program = export(layer, (torch.randn(8, 64).to(dtype),), dynamic_shapes=({0: Dim("rows", min=1, max=200)},))
    exe = mlc.compile(program, log=False)
    for rows in (1, 3, 8, 150):
        x = torch.randn(rows, 64).to(dtype)
        wanted = layer.double()(x.double()).detach().numpy()
        layer.to(dtype)
        given = x.numpy() if dtype == torch.float16 else x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        np.testing.assert_allclose(exe(given)[0].astype("float64"), wanted, rtol=1e-2, atol=1e-2)


def test_a_range_may_be_narrowed_but_not_widened() -> None:
    program = export(Image().eval(), (torch.randn(2, 3, 8, 8),), dynamic_shapes={"image": {0: Dim("batch", max=16)}})
    narrowed = load_model(program, shapes={"image": "2..4,3,8,8"}).inputs[0].shape[0]
    assert isinstance(narrowed, Free) and narrowed.range == Range(2, 4)
    assert load_model(program, shapes={"image": (5, 3, 8, 8)}).inputs[0].shape == (5, 3, 8, 8)
    for shape, said in [
        ("1..17,3,8,8", r"must lie within what .* was exported for, 1\.\.16,3,8,8, got 1\.\.17,3,8,8"),
        ("1..16,3,8,9", "must lie within"), ("1..16,3,8", "must lie within"),
        ("4..2,3,8,8", r"LOW\.\.HIGH with 1 <= LOW <= HIGH, got 4\.\.2"),
        ("0..2,3,8,8", r"LOW\.\.HIGH with 1 <= LOW <= HIGH, got 0\.\.2"),
        ("-3,3,8,8", r"LOW\.\.HIGH with 1 <= LOW <= HIGH, got -3\.\.-3"),
    ]:
        with pytest.raises(UsageError, match=said) as caught:
            load_model(program, shapes={"image": shape})
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"shapes must name inputs of .*image.*got picture"):
        load_model(program, shapes={"picture": "1,3,8,8"})


def test_shapes_that_contradict_each_other() -> None:
    program = export(Pairs(), (torch.randn(4, 6), torch.randn(8, 6)),
                     dynamic_shapes={"x": {0: (rows := Dim("rows", max=33))}, "y": {0: 2 * rows}})
    with pytest.raises(UsageError, match=r"follows from .*=1\.\.33 and is 2\.\.66, but shapes say 8") as caught:
        load_model(program, shapes={"y": (8, 6)})
    assert "\n" not in str(caught.value)


def test_a_dimension_that_nothing_stands_for_alone_is_refused() -> None:
    program = export(Image().eval(), (torch.randn(4, 3, 8, 8),), dynamic_shapes={"image": {0: 2 * Dim("half", max=8)}})
    with pytest.raises(ModelError, match=r"free size must be a whole dimension of some input") as caught:
        load_model(program)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "sizes", "value"), [
    ("2*s77", {"s77": 5}, 10), ("s77 + 1", {"s77": 5}, 6), ("past + length", {"past": 0, "length": 3}, 3),
    ("3*a - 2", {"a": 4}, 10), ("a + 2 * b + 1", {"a": 1, "b": 2}, 6), ("b * 2 + b", {"b": 7}, 21),
    ("-1*a + 9", {"a": 4}, 5),
])
def test_linear_sizes(text: str, sizes: dict[str, int], value: int) -> None:
    linear = Linear.parse(text)
    assert linear is not None and linear.of(sizes) == value
    again = Linear.parse(str(linear))
    assert again is not None and again.of(sizes) == value
    assert linear.within({name: Range(size, size) for name, size in sizes.items()}) == (value, value)


@pytest.mark.parametrize("text", ["batch", "a*b", "a//2", "7", "(a + 1)*2", "", "a +"])
def test_what_is_not_linear(text: str) -> None:
    assert Linear.parse(text) is None
