"""Reshapes and transposes merge, cancel and move out of the way of fusion."""

from __future__ import annotations

from relax_evaluation import assert_becomes, assert_same_values, assert_unchanged, module, operators, weight
from tvm.script import relax as R

from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.simplify import JoinPieces, MergeMovement, SinkMovement


def test_everything_that_only_changes_the_shape_is_one_reshape() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            a = R.expand_dims(x, axis=[0])
            b = R.permute_dims(a, axes=[1, 0, 2, 3])  # moves a unit axis only
            c = R.squeeze(b, axis=[1])
            d = R.reshape(c, (6, 4))
            y = R.flatten(d)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            y = R.reshape(x, (24,))
            R.output(y)
        return y

    assert_becomes(MergeMovement, before, expected)


def test_transposes_merge_and_cancel() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[1, 2, 0])
            b = R.permute_dims(a, axes=[2, 0, 1])
            c = R.nn.relu(b)
            d = R.permute_dims(c, axes=[1, 0, 2])
            y = R.permute_dims(d)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3, 4), "float32")):
        with R.dataflow():
            c = R.nn.relu(x)
            y = R.permute_dims(c, axes=[2, 0, 1])
            R.output(y)
        return y

    assert_same_values(before, assert_becomes(MergeMovement, before, expected))


def test_a_transpose_that_is_its_own_inverse_twice_only() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 2, 2), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[1, 2, 0])
            y = R.permute_dims(a, axes=[1, 2, 0])  # a rotation: equal axes that do not cancel
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 2, 2), "float32")):
        with R.dataflow():
            y = R.permute_dims(x, axes=[2, 0, 1])
            R.output(y)
        return y

    assert_same_values(before, assert_becomes(MergeMovement, before, expected))


def test_split_becomes_slices() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 7), "float32")):
        with R.dataflow():
            s = R.split(x, indices_or_sections=[3, 4], axis=1)
            a = s[0]
            b = s[2]
            y = R.add(a, b)
            R.output(y)
        return y

    after = MergeMovement(module(before))
    assert operators(after) == ["strided_slice", "strided_slice", "add"]
    assert_same_values(before, after)


def test_transposes_meet_across_elementwise_operators() -> None:
    bias = weight(4)

    @R.function(private=True)
    def before(x: R.Tensor((1, 4, 5, 6), "float32"), z: R.Tensor((1, 4, 5, 6), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[0, 2, 3, 1])
            b = R.add(a, bias)
            c = R.permute_dims(z, axes=[0, 2, 3, 1])
            d = R.nn.relu(R.multiply(b, c))
            y = R.permute_dims(d, axes=[0, 3, 1, 2])
            R.output(y)
        return y

    after = SinkMovement(module(before))
    assert operators(after) == ["add", "multiply", "nn.relu"]
    assert_same_values(before, after)


def test_a_transpose_used_twice_does_not_move() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[1, 0])
            y = R.matmul(R.nn.relu(a), R.exp(R.permute_dims(a, axes=[1, 0])))
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.permute_dims(x, axes=[1, 0])
            b = R.nn.relu(a)
            c = R.exp(x)
            y = R.matmul(b, c)
            R.output(y)
        return y

    assert_becomes(MergeMovement, before, expected)


def test_moves_pass_a_function_that_uses_its_argument_twice() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 6, 1, 4), "float32")):
        with R.dataflow():
            a = R.reshape(x, (1, 6, 4))
            b = R.permute_dims(a, axes=[0, 2, 1])
            c = R.multiply(b, R.const([0.5, 1, 2, 3, 4, 5], "float32"))
            d = R.sin(c)
            e = R.add(b, d)
            f = R.permute_dims(e, axes=[0, 2, 1])
            g = R.multiply(f, R.sigmoid(f))
            y = R.reshape(g, (1, 6, 1, 4))
            R.output(y)
        return y

    after = SinkMovement(module(before))
    assert not {"permute_dims"} & set(operators(after))
    shapes = [tuple(b.var.ty.shape.values) for b in bindings(after["main"]) if op_name(b.value) != "relax.reshape"]
    assert set(shapes) == {(1, 6, 1, 4)}
    assert_same_values(before, after)


def test_dense_layers_become_flat_and_keep_their_epilogues() -> None:
    w, u, bias, gamma, beta = weight(8, 16), weight(16, 8), weight(16), weight(8), weight(8)

    @R.function(private=True)
    def before(x: R.Tensor((2, 5, 8), "float32")):
        with R.dataflow():
            a = R.nn.gelu(R.add(R.matmul(x, w), bias))
            b = R.add(R.matmul(a, u), x)
            c = R.nn.layer_norm(b, gamma, beta, axes=[-1], epsilon=1e-5)
            y = R.nn.softmax(c, axis=-1)
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 5, 8), "float32")):
        with R.dataflow():
            f = R.reshape(x, (10, 8))
            a = R.nn.gelu(R.add(R.matmul(f, w), bias))
            m = R.matmul(a, u)
            g = R.reshape(x, (10, 8))
            b = R.add(m, g)
            c = R.nn.layer_norm(b, gamma, beta, axes=[-1], epsilon=1e-5)
            d = R.nn.softmax(c, axis=-1)
            y = R.reshape(d, (2, 5, 8))
            R.output(y)
        return y

    assert_same_values(before, assert_becomes(SinkMovement, before, expected))


def test_a_reshape_that_splits_rows_stays_before_softmax() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 12), "float32")):
        with R.dataflow():
            y = R.nn.softmax(R.reshape(x, (2, 3, 4)), axis=-1)
            R.output(y)
        return y

    assert_unchanged(SinkMovement, before)


def test_a_broadcast_along_split_axes_keeps_the_reshape() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 12), "float32"), m: R.Tensor((3, 1), "float32")):
        with R.dataflow():
            y = R.add(R.reshape(x, (2, 3, 4)), m)
            R.output(y)
        return y

    assert_unchanged(SinkMovement, before)


def test_two_products_with_different_shapes_settle() -> None:
    w, u = weight(4, 6), weight(4, 6)

    @R.function(private=True)
    def before(x: R.Tensor((1, 6, 4), "float32"), z: R.Tensor((6, 4), "float32")):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.reshape(R.matmul(z, u), (1, 6, 6))
            y = R.nn.relu(R.add(a, b))
            R.output(y)
        return y

    after = SinkMovement(module(before))
    assert operators(after) == ["reshape", "matmul", "matmul", "add", "nn.relu", "reshape"]
    assert_same_values(before, after)


def test_one_constant_place_is_a_slice() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((4, 3), "float32")):
        with R.dataflow():
            a = R.take(x, R.const(2, "int64"), axis=1)
            b = R.take(x, R.const([1], "int64"), axis=-1)
            y = R.add(R.expand_dims(a, axis=1), b)
            R.output(y)
        return y

    after = JoinPieces(module(before))
    assert operators(after) == ["strided_slice", "reshape", "strided_slice", "reshape", "expand_dims", "add"]
    assert_same_values(before, after)


def test_places_that_are_several_or_outside_stay_taken() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((4, 3), "float32"), i: R.Tensor((1,), "int64")):
        with R.dataflow():
            a = R.take(x, R.const([0, 2], "int64"), axis=1)
            b = R.take(x, R.const([3], "int64"), axis=1, mode="clip")
            y = R.add(R.add(a, b), R.take(x, i, axis=1))
            R.output(y)
        return y

    assert_unchanged(JoinPieces, before)
