"""Convolutions over one axis become convolutions of images, and stay what they compute."""

from __future__ import annotations

import pytest
from relax_evaluation import assert_same_values, assert_unchanged, module, weight
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.pipeline import simplified
from mlc.graph.simplify import LiftToImages


def _names(func: relax.Function) -> list[str]:
    return [op_name(b.value).removeprefix("relax.") for b in bindings(func)]


def _function(shape: tuple[int, ...], *steps) -> relax.Function:  # type: ignore[no-untyped-def]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for step in steps:
                value = builder.emit(step(value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()["main"]


LINES = {
    "convolution": lambda x: op.nn.conv1d(x, weight(10, 3, 5), strides=2, padding=[1, 2], dilation=2, groups=2),
    "transposed": lambda x: op.nn.conv1d_transpose(
        x, weight(6, 4, 4), strides=3, padding=[1, 1], output_padding=1
    ),
    "maximum": lambda x: op.nn.max_pool1d(x, pool_size=3, strides=2, padding=[1, 1], ceil_mode=True),
    "average": lambda x: op.nn.avg_pool1d(x, pool_size=3, strides=1, padding=[1, 1], count_include_pad=True),
}


@pytest.mark.parametrize("name", LINES)
def test_one_axis_becomes_a_row(name: str) -> None:
    before = _function((2, 6, 25), LINES[name])
    after = LiftToImages(module(before))
    first, image, last = _names(after["main"])
    assert (first, last) == ("reshape", "reshape")
    assert "2d" in image
    assert_same_values(before, after)


def test_a_column_is_laid_down() -> None:
    before = _function(
        (2, 6, 25, 1), lambda x: op.nn.conv2d(x, weight(10, 6, 5, 1), strides=[2, 1], padding=[2, 0, 1, 0])
    )
    after = LiftToImages(module(before))
    assert _names(after["main"]) == ["reshape", "nn.conv2d", "reshape"]
    assert_same_values(before, after)
    padded = _function((2, 6, 25, 1), lambda x: op.nn.conv2d(x, weight(10, 6, 3, 3), padding=[1, 1, 1, 1]))
    assert_unchanged(LiftToImages, padded)


def test_layers_over_one_axis_keep_no_reshape_between_them() -> None:
    before = _function(
        (1, 6, 40),
        lambda x: op.nn.conv1d(x, weight(8, 6, 3), padding=1),
        lambda x: op.add(x, weight(1, 8, 1)),
        op.nn.relu,
        lambda x: op.nn.max_pool1d(x, pool_size=2, strides=2),
        lambda x: op.nn.conv1d(x, weight(4, 8, 3), padding=1),
        lambda x: op.add(x, weight(4, 1)),
    )
    mod = simplified(module(before))
    assert _names(mod["main"]) == [
        "reshape", "nn.conv2d", "add", "nn.relu", "nn.max_pool2d", "nn.conv2d", "add", "reshape",
    ]
    assert_same_values(before, mod)


def test_images_of_rows_are_made_by_one_transpose() -> None:
    before = _function(
        (2, 15, 6), lambda x: op.permute_dims(x, [0, 2, 1]), lambda x: op.reshape(x, (2, 6, 3, 5)), op.nn.relu,
        lambda x: op.reshape(x, (2, 6, 15)), lambda x: op.permute_dims(x, [0, 2, 1]),
    )
    after = LiftToImages(module(before))
    assert _names(after["main"]) == ["reshape", "permute_dims", "nn.relu", "permute_dims", "reshape"]
    assert_same_values(before, after)
    assert _names(simplified(after)["main"]) == ["nn.relu"]


def test_other_transposes_of_rows_stay() -> None:
    assert_unchanged(LiftToImages, _function(
        (2, 15, 6), lambda x: op.permute_dims(x, [0, 2, 1]), lambda x: op.reshape(x, (2, 3, 6, 5))))
    assert_unchanged(LiftToImages, _function(
        (2, 3, 6, 5), lambda x: op.reshape(x, (2, 15, 6)), lambda x: op.permute_dims(x, [0, 2, 1])))
