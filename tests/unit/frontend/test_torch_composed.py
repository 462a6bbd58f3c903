"""Operators that PyTorch's exporter lacks or translates wrongly compute what PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mlc
from mlc.frontend.pytorch import export_module, to_onnx

X = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
Y = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
GAPS = torch.where(X > 1, torch.nan, X)
IMAGE = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(2))
VOLUME = torch.randn(1, 2, 5, 6, 7, generator=torch.Generator().manual_seed(3))
ROWS = torch.tensor([2, 0, 2])
PLACES = (X * 10).long() % 3
IDS = (X.abs() * 10).long() % 9
TABLE = torch.randn(9, 4, generator=torch.Generator().manual_seed(4))
FIVE = torch.randn(5, 4, generator=torch.Generator().manual_seed(5))


class Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a, b=None, c=None, d=None):
        return self.function(*(each for each in (a, b, c, d) if each is not None))


def _set(x, mask, values):
    y = x.clone()
    y[mask] = values
    return y


def _bags(mode: str, **options: Any) -> Callable[..., Any]:
    return lambda ids, table: F.embedding_bag(ids, table, mode=mode, **options)


CASES: dict[str, tuple[Callable[..., Any], ...] | Any] = {
    "max_pool_1d": (lambda x: F.adaptive_max_pool1d(x, 3, True), IMAGE[0]),
    "max_pool_2d": (lambda x: F.adaptive_max_pool2d(x, (3, 4), True), IMAGE),
    "max_pool_2d_equal": (lambda x: F.adaptive_max_pool2d(x, (7, 3), True), IMAGE),
    "max_pool_3d": (lambda x: F.adaptive_max_pool3d(x, 4, True), VOLUME),
    "mean_pool_3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)), VOLUME),
    "bag_sum": (_bags("sum", padding_idx=3), IDS, TABLE),
    "bag_mean": (_bags("mean"), IDS, TABLE),
    "bag_largest": (_bags("max", padding_idx=3), IDS, TABLE),
    "bags_of_their_own": (lambda ids, table, begins: F.embedding_bag(ids, table, begins, mode="mean"),
                          IDS[0], TABLE, torch.tensor([0, 2, 2])),
    "weighted_bags": (lambda ids, table, weights: F.embedding_bag(ids, table, per_sample_weights=weights, mode="sum"),
                      IDS, TABLE, X),
    "number_where_a_mask_says": (lambda x, mask: _set(x, mask, 0.5), X, Y > 0),
    "row_where_a_mask_says": (_set, X, Y[:, 0] > 0, Y[0]),
    "rows_where_a_mask_says": (_set, X, torch.tensor([True, False, True]), Y[:2]),
    "masked_scatter": (torch.masked_scatter, X, Y > 0, Y),
    "masked_scatter_of_rows": (lambda x, mask, rows: x.masked_scatter(mask[:, None].expand_as(x), rows),
                               X, torch.tensor([True, False, True]), Y[:2]),
    "scatter_mean": (lambda x, i, y: x.scatter_reduce(0, i, y, "mean"), X, PLACES, Y),
    "scatter_mean_of_others": (lambda x, i, y: x.scatter_reduce(0, i, y, "mean", include_self=False), X, PLACES, Y),
    "index_reduce": (lambda x, i, y: x.index_reduce(0, i, y, "amax"), X, ROWS, Y),
    "cummax": (lambda x: torch.cummax(x, 1), (X * 2).round()),
    "cummin": (lambda x: torch.cummin(x, 0), GAPS),
    "kthvalue": (lambda x: torch.kthvalue(x, 2, 0, keepdim=True), X),
    "median": (lambda x: torch.median(x, 1)[0], GAPS),
    "median_of_all": (torch.median, X),
    "nanmedian": (lambda x: torch.nanmedian(x, 1), GAPS),
    "searchsorted": (lambda rows, x: torch.searchsorted(rows, x, right=True), X.sort(1)[0], Y),
    "searchsorted_in_one": (lambda row, x: torch.searchsorted(row, x, out_int32=True), X[0].sort()[0], Y),
    **{f"distances_{p}": (lambda a, b, p=p: torch.cdist(a, b, p), FIVE, TABLE)
       for p in (0.0, 1.0, 2.0, 3.0, torch.inf)},
    "distances_by_product": (lambda a: torch.cdist(a[:, :4], a), X.T.repeat(8, 2)[:, :4]),
    "rrelu": (F.rrelu, X),
    "checked": (lambda x: (torch._check_tensor_all(x < 100), x + 1)[1], X),
    "amax": (lambda x: (x.amax(), torch.aminmax(x)), X),
    "numbers": (lambda a, b: (torch.fmax(a, b), torch.fmin(b, a)), GAPS, Y),
    "hypot": (torch.hypot, X, Y),
    **{f"smoothed_classes_{how}": (
        lambda x, y, w, how=how: F.cross_entropy(x, y, w, ignore_index=1, label_smoothing=0.2, reduction=how),
        X, torch.tensor([4, 1, 6]), Y[0].abs()) for how in ("none", "mean", "sum")},
    "smoothed_pixels": (lambda x, y: F.cross_entropy(x, y, ignore_index=1, label_smoothing=0.2), IMAGE,
                        torch.arange(84).reshape(2, 7, 6) % 3),
    "classes_of_probabilities": (lambda x, y, w: F.cross_entropy(x, y.softmax(1), w, label_smoothing=0.2),
                                 X, Y, Y[0].abs()),
    **{make.__name__: (lambda x, make=make: x * make(7) + make(3, False).sum(), X) for make in
       (torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.hann_window, torch.kaiser_window)},
    "window_of_coefficients": (lambda x: x * torch.hamming_window(7, True, 0.6, 0.3), X),
    "window_of_halves": (lambda x: x * torch.blackman_window(7, dtype=torch.float16), X),
    "margins_of_labels": (F.multilabel_margin_loss, X[:2, :4], torch.tensor([[1, 2, -1, 0], [0, -1, 3, 1]])),
    "mean_pool_2d_by_five": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=5), IMAGE),
    "mean_pool_3d_by_five": (lambda x: F.avg_pool3d(x, 2, count_include_pad=False, divisor_override=5), VOLUME),
    "place_among_all": (lambda x: (x.argmax(keepdim=True), x.argmin(keepdim=True)), X),
    "statistics_of_the_batch": (lambda x, m, v: F.batch_norm(x, m.clone(), v.clone(), training=True), IMAGE,
                                X[:, 0], Y[:, 0].abs()),
    **{f"smooth_{mode}_{corners}": (
        lambda x, mode=mode, corners=corners: F.interpolate(
            x, scale_factor=(0.6, 1.7), mode=mode, align_corners=corners, antialias=True), IMAGE)
       for mode in ("bilinear", "bicubic") for corners in (False, True)},
    "attention_to_nothing": (F.scaled_dot_product_attention, IMAGE, IMAGE, IMAGE, torch.ones(7, 7).tril(-1) > 0),
    "attention_of_groups_to_nothing": (
        lambda x, y, m: F.scaled_dot_product_attention(x, y, y, m, scale=0.3, enable_gqa=True),
        IMAGE.repeat(1, 2, 1, 1), IMAGE, torch.where(torch.ones(7, 7).tril(-1) > 0, 0.0, -torch.inf)),
    "number_without_integers": (lambda x, m: (2.5 - x, torch.rsub(x, 1.5, alpha=2), 1.0 - m), PLACES,
                                (Y > 0).to(torch.uint8)),
    "not_itself": (lambda x: (x != x, x <= x, torch.nanmean(x, 1)), GAPS),
    "around_what_is_left": (lambda x: F.pad(x, (-1, 2, 2, -3), "circular"), IMAGE),
    "copysign": (torch.copysign, X, -Y.abs() * 0),
}


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_pytorch_does(name: str) -> None:
    function, *inputs = CASES[name]
    module = Called(function).eval()
    session = onnxruntime.InferenceSession(to_onnx(export_module(module, inputs, name), name).SerializeToString())
    feeds = dict(zip((each.name for each in session.get_inputs()), (each.numpy() for each in inputs), strict=True))
    wanted = torch.utils._pytree.tree_leaves(module(*inputs))
    for got, tensor in zip(session.run(None, feeds), wanted, strict=True):
        assert got.dtype == tensor.numpy().dtype
        np.testing.assert_allclose(got, tensor.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_it_compiles(name: str) -> None:
    function, *inputs = CASES[name]
    module = Called(function).eval()
    got = mlc.compile(module, example_inputs=inputs, log=False)(*(each.numpy() for each in inputs))
    for found, tensor in zip(got, torch.utils._pytree.tree_leaves(module(*inputs)), strict=True):
        np.testing.assert_allclose(found, tensor.numpy(), rtol=1e-4, atol=1e-5)
