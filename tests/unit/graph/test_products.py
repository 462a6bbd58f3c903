"""Which product a task computes is read from what it computes, whatever it is called."""

from __future__ import annotations

import pytest
from relax_evaluation import module, weight
from tvm.script import relax as R

from mlc.graph.pipeline import lower
from mlc.graph.products import product_of
from mlc.options import DEFAULT_OPTIONS
from mlc.target import resolve


@pytest.mark.parametrize("target", ["x86-64-v3", "cuda:sm_80"])
def test_a_window_over_channels_is_a_convolution_and_other_products_are_of_matrices(target: str) -> None:
    narrow, spatial, wide, dense = weight(32, 16, 1, 1), weight(32, 1, 3, 3), weight(32, 32, 3, 3), weight(32 * 16, 24)

    @R.function(private=True)
    def func(x: R.Tensor((1, 16, 8, 8), "float32")):
        with R.dataflow():
            a = R.nn.relu(R.nn.conv2d(x, narrow))
            s = R.nn.relu(R.nn.conv2d(a, spatial, padding=1, groups=32))
            b = R.nn.relu(R.nn.conv2d(s, wide, strides=2, padding=1))
            c = R.reshape(R.matmul(R.reshape(b, (1, 512)), dense), (4, 6))
            d = R.matmul(R.permute_dims(c), c)
            y = R.nn.softmax(d)
            R.output(y)
        return y

    tasks = lower(module(func), resolve(target, threads=2)).tasks
    products = [product for task in tasks for product in [product_of(task.func)] * task.weight if product]
    assert products == ["conv2d", "conv2d", "matmul", "matmul"] and len(tasks) > len(products)


def test_several_products_are_none_and_so_is_what_transforms_surround() -> None:
    w = weight(64, 64, 3, 3)

    @R.function(private=True)
    def func(x: R.Tensor((1, 64, 32, 32), "float32")):
        with R.dataflow():
            y = R.nn.relu(R.nn.conv2d(x, w, padding=1))
            R.output(y)
        return y

    lowered = lower(module(func), resolve("x86-64-v3", threads=2), options=DEFAULT_OPTIONS)
    found = {task.name: product_of(task.func) for task in lowered.alternatives}
    assert found == {"fused_conv2d_relu": "conv2d", "fused_winograd_2x2_relu": None, "fused_winograd_4x4_relu": None}
