"""Products over channels run before a resize, and are one with the product of the rows that an image is made of."""

from __future__ import annotations

import pytest
import tvm
from relax_evaluation import assert_same_values, assert_unchanged, network, weight
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import bindings, op_name, shape_of
from mlc.graph.simplify import DropIdentities, MovePointwise


def _resized(x: relax.Expr, size: tuple[int, int], **how: str) -> relax.Expr:
    how = {"method": "linear", "coordinate_transformation_mode": "half_pixel"} | how
    return op.image.resize2d(x, relax.ShapeExpr(size), layout="NCHW", **how)


def _chain(shape: tuple[int, ...], *steps) -> tvm.IRModule:  # type: ignore[no-untyped-def]
    def body(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        for step in steps:
            x = builder.emit(step(x))
        return x

    return network(shape, body)


def _image(rows: tuple[int, ...], order: tuple[int, ...], image: tuple[int, ...]):  # type: ignore[no-untyped-def]
    return [lambda x: op.reshape(x, rows), lambda x: op.permute_dims(x, order), lambda x: op.reshape(x, image)]


def _calls(mod: tvm.IRModule) -> list[tuple[str, tuple[int, ...]]]:
    return [(op_name(b.value).removeprefix("relax."), shape_of(b.var)) for b in bindings(mod["main"])
            if isinstance(b.value, relax.Call)]


@pytest.mark.parametrize("how", [
    {}, {"coordinate_transformation_mode": "align_corners"},
    {"method": "nearest_neighbor", "coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"},
])
def test_channels_are_mixed_before_they_are_resized(how: dict[str, str]) -> None:
    before = _chain((2, 6, 5, 4), lambda x: _resized(x, (10, 9), **how), lambda x: op.nn.conv2d(x, weight(4, 6, 1, 1)))
    after = MovePointwise(before)
    assert _calls(after) == [("nn.conv2d", (2, 4, 5, 4)), ("image.resize2d", (2, 4, 10, 9))]
    assert_same_values(before, after)


@pytest.mark.parametrize("steps", [
    (lambda x: _resized(x, (3, 2)), lambda x: op.nn.conv2d(x, weight(4, 6, 1, 1))),  # fewer pixels after it
    (lambda x: _resized(x, (6, 5)), lambda x: op.nn.conv2d(x, weight(100, 6, 1, 1))),  # many more channels to resize
    (lambda x: _resized(x, (10, 9)), lambda x: op.nn.conv2d(x, weight(4, 6, 3, 3))),
    (lambda x: _resized(x, (10, 9)), lambda x: op.nn.conv2d(x, weight(4, 6, 1, 1), strides=2)),
    (lambda x: _resized(x, (10, 9)), lambda x: op.nn.conv2d(x, weight(4, 6, 1, 1), padding=1)),
    (lambda x: _resized(x, (10, 9)), lambda x: op.nn.conv2d(x, weight(6, 2, 1, 1), groups=3)),
    (lambda x: _resized(x, (10, 9), method="cubic"), lambda x: op.nn.conv2d(x, weight(4, 6, 1, 1))),
    (lambda x: _resized(x, (10, 9)), op.nn.relu, lambda x: op.nn.conv2d(x, weight(4, 6, 1, 1))),
])
def test_other_convolutions_stay_behind(steps) -> None:  # type: ignore[no-untyped-def]
    assert_unchanged(MovePointwise, _chain((2, 6, 5, 4), *steps)["main"])


def test_parts_of_a_concatenation_are_mixed_where_they_are_small() -> None:
    def body(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        small = builder.emit(op.nn.avg_pool2d(x, (2, 2), strides=2))
        least = builder.emit(op.nn.max_pool2d(x, (4, 4), strides=4))
        parts = [x, builder.emit(_resized(small, (8, 12))), builder.emit(op.nn.relu(x)),
                 builder.emit(_resized(least, (8, 12)))]
        return builder.emit(op.nn.conv2d(builder.emit(op.concat(parts, 1)), weight(5, 24, 1, 1)))

    before = network((2, 6, 8, 12), body)
    after = MovePointwise(before)
    mixed = [shape for name, shape in _calls(after) if name == "nn.conv2d"]
    assert sorted(mixed) == [(2, 5, 2, 3), (2, 5, 4, 6), (2, 5, 8, 12)]
    assert_same_values(before, after)


def test_a_resized_map_that_others_read_stays() -> None:
    def body(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        large = builder.emit(_resized(x, (10, 8)))
        mixed = builder.emit(op.nn.conv2d(large, weight(6, 6, 1, 1)))
        return builder.emit(op.add(mixed, large))

    assert_unchanged(MovePointwise, network((2, 6, 5, 4), body)["main"])


@pytest.mark.parametrize("bias", [(), (1,), (6,), (12, 6), (1, 6)])
@pytest.mark.parametrize("rows", [
    _image((2, 6, 6), (0, 2, 1), (2, 6, 2, 3)),
    [lambda x: op.reshape(x, (2, 2, 3, 6)), lambda x: op.permute_dims(x, (0, 3, 1, 2))],
])
def test_a_product_of_rows_takes_in_the_one_of_their_image(bias: tuple[int, ...], rows) -> None:  # type: ignore[no-untyped-def]
    before = _chain(
        (12, 8), lambda x: op.matmul(x, weight(8, 6)), lambda x: op.add(x, weight(*bias)), *rows,
        lambda x: op.nn.conv2d(x, weight(5, 6, 1, 1)),
    )
    after = MovePointwise(before)
    assert [name for name, _ in _calls(after)] == ["matmul", "add", "reshape", "permute_dims"]
    assert_same_values(before, after)


@pytest.mark.parametrize("steps", [
    (lambda x: op.matmul(x, weight(8, 2)), *_image((2, 6, 2), (0, 2, 1), (2, 2, 2, 3)), 2, 20),  # a bottleneck
    (lambda x: op.matmul(x, weight(8, 6)), *_image((2, 6, 6), (0, 1, 2), (2, 6, 2, 3)), 6, 5),  # rows are channels
    (lambda x: op.matmul(x, weight(8, 6)), *_image((6, 2, 6), (1, 2, 0), (2, 6, 2, 3)), 6, 5),  # images within rows
    (lambda x: op.matmul(x, weight(8, 6)), *_image((2, 6, 6), (0, 2, 1), (1, 6, 4, 3)), 6, 5),  # images are mixed
])
def test_other_rows_keep_their_product(steps) -> None:  # type: ignore[no-untyped-def]
    *moves, inputs, outputs = steps
    before = _chain((12, 8), *moves, lambda x: op.nn.conv2d(x, weight(outputs, inputs, 1, 1)))
    assert_unchanged(MovePointwise, before["main"])


def test_a_resize_to_the_same_size_is_none() -> None:
    after = DropIdentities(_chain((2, 6, 5, 4), lambda x: _resized(x, (5, 4)), op.nn.relu))
    assert [name for name, _ in _calls(after)] == ["nn.relu"]
    how = {"method": "nearest_neighbor", "coordinate_transformation_mode": "tf_half_pixel_for_nn",
           "rounding_method": "round_prefer_ceil"}
    assert_unchanged(DropIdentities, _chain((2, 6, 5, 4), lambda x: _resized(x, (5, 4), **how))["main"])
