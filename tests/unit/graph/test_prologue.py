"""Elementwise work before a convolution: when it joins the convolution's kernel and when it must not."""

from __future__ import annotations

import pytest
from relax_evaluation import assert_same_values, module, weight
from tvm import relax
from tvm.script import relax as R

from mlc.graph.pipeline import optimise
from mlc.graph.tasks import extract_tasks
from mlc.options import CompileOptions
from mlc.target import resolve

CPU = resolve("native")
DIRECT = CompileOptions.of(winograd=False)


def _kernels(func: relax.Function) -> list[str]:
    mod = optimise(module(func), CPU, options=DIRECT)
    assert_same_values(func, mod)
    return [task.name for task in extract_tasks(mod, CPU)]


@pytest.mark.parametrize("kernel", [1, 3])
def test_scale_shift_and_activation_join_the_convolution_after_them(kernel: int) -> None:
    w, u = weight(64, 64, 1, 1), weight(64, 64, kernel, kernel)
    s, t, b = weight(1, 64, 1, 1), weight(1, 64, 1, 1, low=0.5), weight(1, 64, 1, 1)

    @R.function(private=True)
    def func(x: R.Tensor((1, 64, 14, 14), "float32")):
        with R.dataflow():
            a = R.nn.conv2d(x, w)
            p = R.nn.max_pool2d(a, (2, 2), strides=(1, 1))
            c = R.nn.relu(R.add(R.multiply(p, s), t))
            y = R.nn.relu(R.add(R.nn.conv2d(c, u, padding=kernel // 2), b))
            z = R.nn.avg_pool2d(y, (2, 2))
            R.output(z, p)  # what is read elsewhere keeps its kernel to itself
        return (z, p)

    names = _kernels(func)
    assert "fused_multiply_add_relu_conv2d_add_relu" in names and "fused_multiply_add_relu" not in names


def test_equal_layers_are_one_task() -> None:
    w = [weight(64, 64, 1, 1) for _ in range(3)]
    t = [weight(1, 64, 1, 1) for _ in range(3)]

    @R.function(private=True)
    def func(x: R.Tensor((1, 64, 14, 14), "float32")):
        with R.dataflow():
            a = R.nn.max_pool2d(R.nn.conv2d(x, w[0]), (3, 3), strides=(1, 1), padding=(1, 1))
            b = R.nn.max_pool2d(R.nn.conv2d(R.nn.relu(R.add(a, t[1])), w[1]), (3, 3), strides=(1, 1), padding=(1, 1))
            y = R.nn.max_pool2d(R.nn.conv2d(R.nn.relu(R.add(b, t[2])), w[2]), (3, 3), strides=(1, 1), padding=(1, 1))
            R.output(y, a, b)
        return (y, a, b)

    tasks = extract_tasks(optimise(module(func), CPU, options=DIRECT), CPU)
    assert [task.weight for task in tasks if task.name == "fused_add_relu_conv2d"] == [2]
    assert_same_values(func, optimise(module(func), CPU, options=DIRECT))


def test_a_value_with_two_readers_is_made_once() -> None:
    w, u = weight(64, 64, 1, 1), weight(64, 64, 3, 3)

    @R.function(private=True)
    def func(x: R.Tensor((1, 64, 14, 14), "float32")):
        with R.dataflow():
            p = R.nn.max_pool2d(R.nn.conv2d(x, w), (2, 2), strides=(1, 1))
            a = R.nn.relu(R.add(p, R.const(0.25, "float32")))
            y = R.nn.max_pool2d(R.nn.conv2d(a, w), (2, 2))
            z = R.nn.max_pool2d(R.nn.conv2d(a, u, padding=1), (2, 2))
            r = R.nn.relu(R.add(p, R.const(0.5, "float32")))
            v = R.nn.max_pool2d(R.add(R.nn.conv2d(r, w), r), (2, 2))  # read by the epilogue as well
            R.output(y, z, v, p)
        return (y, z, v, p)

    names = _kernels(func)
    assert "fused_add_relu" in names and not any("relu_conv2d" in name for name in names)


@pytest.mark.usefixtures("always_blocked")
def test_a_gate_joins_the_convolution_after_it() -> None:
    """Squeeze and excitation: the gate is a small tensor that another kernel makes."""
    w = weight(64, 64, 1, 1)

    @R.function(private=True)
    def func(x: R.Tensor((1, 64, 14, 14), "float32")):
        with R.dataflow():
            a = R.nn.max_pool2d(R.nn.conv2d(x, w), (2, 2), strides=(1, 1))
            g = R.sigmoid(R.nn.conv2d(R.mean(a, axis=[2, 3], keepdims=True), w))
            y = R.nn.max_pool2d(R.nn.conv2d(R.multiply(a, g), w), (2, 2))
            R.output(y)
        return y

    assert "fused_multiply_conv2d" in _kernels(func)
