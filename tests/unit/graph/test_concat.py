"""Which concatenations need no copy, and what of them is copied all the same."""

from __future__ import annotations

import numpy as np
import pytest
from relax_evaluation import assert_same_values, evaluate, module, operators, weight
from tvm import relax
from tvm.script import relax as R

import mlc
from mlc.graph.pipeline import optimise
from mlc.graph.tasks import extract_tasks
from mlc.target import resolve

CPU = resolve("native")


def _kernels(func: relax.Function) -> tuple[list[str], int]:
    """The kernels, sorted, and how many concatenations are left to be views."""
    mod = optimise(module(func), CPU)
    assert_same_values(func, mod)
    names = sorted(task.name.removeprefix("fused_") for task in extract_tasks(mod, CPU) for _ in range(task.weight))
    return names, operators(mod).count("concat")


def test_convolutions_write_into_the_whole() -> None:
    w, u = weight(16, 16, 1, 1), weight(32, 16, 3, 3)

    @R.function(private=True)
    def func(x: R.Tensor((1, 16, 6, 6), "float32")):
        with R.dataflow():
            a = R.nn.relu(R.nn.conv2d(x, w))
            b = R.nn.relu(R.nn.conv2d(a, u, padding=1))
            y = R.concat((a, b), axis=1)
            z = R.nn.max_pool2d(y, (2, 2))
            R.output(z)
        return z

    names, views = _kernels(func)
    assert views == 1 and not any("copy" in name or "concatenate" in name for name in names)


def test_concatenations_of_concatenations_nest() -> None:
    w, u, v = weight(16, 16, 3, 3), weight(16, 32, 3, 3), weight(16, 48, 3, 3)

    @R.function(private=True)
    def func(x: R.Tensor((1, 16, 6, 6), "float32")):
        with R.dataflow():
            a = R.nn.conv2d(x, w, padding=1)
            b = R.nn.conv2d(a, w, padding=1)
            ab = R.concat((a, b), axis=1)
            c = R.nn.conv2d(ab, u, padding=1)
            abc = R.concat((ab, c), axis=1)
            d = R.nn.conv2d(abc, v, padding=1)
            y = R.nn.avg_pool2d(R.concat((abc, d), axis=1), (2, 2))
            R.output(y)
        return y

    names, views = _kernels(func)
    assert views == 3 and not any("copy" in name or "concatenate" in name for name in names)


def test_what_has_another_place_is_copied() -> None:
    w, k = weight(16, 16, 3, 3), weight(1, 16, 6, 6)

    @R.function(private=True)
    def func(x: R.Tensor((1, 16, 6, 6), "float32")):
        with R.dataflow():
            a = R.nn.conv2d(x, w, padding=1)
            b = R.nn.conv2d(a, w, padding=1)
            c = R.nn.conv2d(b, w, padding=1)
            first = R.concat((a, b, c, k), axis=1)  # a constant
            second = R.concat((c, b, a, c), axis=1)  # twice the same
            y = R.add(R.nn.max_pool2d(first, (2, 2)), R.nn.max_pool2d(second, (2, 2)))
            R.output(y)
        return y

    names, views = _kernels(func)
    assert views == 1  # most of the first concatenation would have to be copied, so that it is a kernel of its own
    assert names.count("copy") == 1 and names.count("concatenate") == 1


def test_a_constant_part_is_copied_into_the_whole() -> None:
    token, w = weight(1, 1, 64), weight(64, 64)

    @R.function(private=True)
    def func(x: R.Tensor((1, 15, 64), "float32")):
        with R.dataflow():
            y = R.concat((token, R.matmul(x, w)), axis=1)
            z = R.matmul(R.nn.softmax(y), w)
            R.output(z)
        return z

    names, views = _kernels(func)
    assert views == 1 and names.count("copy") == 1
    exe = mlc.compile(module(func), target=CPU, log=False)  # the view needs a kernel that makes the part
    x = np.random.default_rng(0).standard_normal((1, 15, 64), dtype="float32")
    (expected,) = evaluate(module(func), x)
    np.testing.assert_allclose(exe(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_outputs_and_inputs_keep_their_own_memory() -> None:
    w = weight(16, 16)

    @R.function(private=True)
    def func(x: R.Tensor((8, 16), "float32")):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.matmul(R.exp(x), w)
            c = R.matmul(R.sin(x), w)
            d = R.matmul(R.cos(x), w)
            y = R.nn.softmax(R.concat((x, b, a, c, d), axis=0))
            z = R.nn.softmax(R.concat((x, a), axis=0))
            R.output(y, z, a)
        return (y, z, a)

    names, views = _kernels(func)
    assert views == 1 and names.count("copy") == 2 and names.count("concatenate") == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_only_contiguous_parts_are_views(batch: int) -> None:
    w = weight(16, 16, 3, 3)
    x = relax.Var("x", relax.TensorType((batch, 16, 6, 6), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x], private=True):
        with builder.dataflow():
            a = builder.emit(relax.op.nn.conv2d(x, w, padding=1))
            b = builder.emit(relax.op.nn.conv2d(a, w, padding=1))
            whole = builder.emit(relax.op.concat((a, b), axis=1))
            y = builder.emit_output(relax.op.nn.max_pool2d(whole, (2, 2)))
        builder.emit_func_output(y)
    names, views = _kernels(builder.finalize()["main"])
    assert views == (batch == 1) and ("concatenate" in names) == (batch == 2)


def test_parts_that_would_merge_with_the_copy_stay_one_kernel() -> None:
    @R.function(private=True)
    def func(x: R.Tensor((1, 8, 24), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[0, 2, 1])
            y = R.nn.relu(R.concat((R.reshape(a, (1, 8, 24)), R.exp(x)), axis=1))
            R.output(y)
        return y

    names, views = _kernels(func)
    assert views == 0 and len(names) == 1


def test_parts_that_start_between_lines_are_copied() -> None:
    w = weight(8, 6)

    @R.function(private=True)
    def func(x: R.Tensor((3, 8), "float32")):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.matmul(R.exp(x), w)
            y = R.nn.softmax(R.concat((a, b), axis=0))  # the second part is at byte 72
            R.output(y)
        return y

    names, views = _kernels(func)
    assert views == 0 and any("concatenate" in name for name in names)


@pytest.mark.parametrize("newest_first", [False, True])
def test_what_joins_all_earlier_layers_is_made_of_what_did_before(newest_first: bool) -> None:
    """As torchvision writes DenseNet."""
    x = relax.Var("x", relax.TensorType((1, 16, 6, 6), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x], private=True):
        with builder.dataflow():
            layers = [builder.emit(relax.op.nn.conv2d(x, weight(16, 16, 3, 3), padding=1))]
            for count in (1, 2, 3):
                joined = builder.emit(relax.op.concat(layers, axis=1)) if count > 1 else layers[0]
                new = builder.emit(relax.op.nn.conv2d(joined, weight(16, 16 * count, 3, 3), padding=1))
                layers = [new, *layers] if newest_first else [*layers, new]
            whole = builder.emit(relax.op.concat(layers, axis=1))
            y = builder.emit_output(relax.op.nn.max_pool2d(whole, (2, 2)))
        builder.emit_func_output(y)
    names, views = _kernels(builder.finalize()["main"])
    assert views == 3 and not any("copy" in name or "concatenate" in name for name in names)
