"""What nothing reads of a tensor is not computed: the values are the same, and the laws of it are proved."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from relax_evaluation import RNG, assert_same_values, assert_unchanged, evaluate, module, network, operators, weight
from substitution_rules import rule
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import relax as R

from mlc.graph.ir.rewrite import bindings, op_name, shape_of
from mlc.graph.pipeline import simplified
from mlc.graph.simplify import DropUnread
from mlc.shapes import Free, Range
from mlc.sizes import scope

Emit = Callable[[relax.Expr], relax.Expr]
TOKENS, WIDTH, HEADS = 24, 32, 4


def elements(mod: tvm.IRModule, *names: str) -> list[int]:
    """How many elements every call of some operators makes, in order."""
    return [math.prod(shape_of(binding.var)) for binding in bindings(mod["main"])
            if isinstance(binding.value, relax.Call) and op_name(binding.value).removeprefix("relax.") in names]


def linear(emit: Emit, x: relax.Expr, width: int) -> relax.Expr:
    return emit(op.add(emit(op.matmul(x, weight(int(x.ty.shape[-1]), width, low=-0.3, high=0.3))), weight(width)))


def norm(emit: Emit, x: relax.Expr) -> relax.Expr:
    return emit(op.nn.layer_norm(x, weight(WIDTH), weight(WIDTH), axes=[-1]))


def block(emit: Emit, x: relax.Expr, batch: int) -> relax.Expr:
    """Attention and a feed-forward part, each with the sum and the norm after it, as encoders have."""
    def heads(y: relax.Expr, order: list[int]) -> relax.Expr:
        return emit(op.permute_dims(emit(op.reshape(y, (batch, TOKENS, HEADS, WIDTH // HEADS))), order))

    q, k, v = (heads(linear(emit, x, WIDTH), order) for order in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
    scores = emit(op.add(emit(op.matmul(q, k)), weight(1, 1, TOKENS, TOKENS)))
    mixed = emit(op.permute_dims(emit(op.matmul(emit(op.nn.softmax(scores, axis=-1)), v)), [0, 2, 1, 3]))
    x = norm(emit, emit(op.add(linear(emit, emit(op.reshape(mixed, (batch, TOKENS, WIDTH))), WIDTH), x)))
    inner = emit(op.nn.gelu(linear(emit, x, 4 * WIDTH)))
    return norm(emit, emit(op.add(linear(emit, inner, WIDTH), x)))


def classifier(batch: int, token: int) -> tvm.IRModule:
    """Two blocks, and a head that reads one token."""
    def body(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        emit = builder.emit
        x = block(emit, block(emit, x, batch), batch)
        first = emit(op.take(x, relax.const(token, "int64"), axis=1, mode="clip"))
        return linear(emit, emit(op.tanh(linear(emit, first, WIDTH))), 3)

    return network((batch, TOKENS, WIDTH), body)


@pytest.mark.parametrize("batch, token", [(1, 0), (3, TOKENS - 1)])
def test_last_block_of_a_classifier_is_computed_of_one_token(batch: int, token: int) -> None:
    before = classifier(batch, token)
    after = DropUnread(before)
    assert_same_values(before, after, 1e-5)
    rows, one = batch * TOKENS * WIDTH, batch * WIDTH
    # the first block; query, key, value, scores, mixed values, output, feed-forward; head
    first = [rows] * 3 + [batch * HEADS * TOKENS**2] + [rows] * 2 + [4 * rows, rows]
    last = [one, rows, rows, batch * HEADS * TOKENS, one, one, 4 * one, one]
    assert elements(after, "matmul") == [*first, *last, one, 3 * batch]
    assert elements(after, "nn.softmax", "nn.gelu")[2:] == [batch * HEADS * TOKENS, 4 * one]
    assert "take" not in operators(after)
    assert DropUnread(after).same_as(after)
    assert elements(simplified(before), "matmul") == elements(after, "matmul")  # as one pass of many


def chosen(builder: relax.BlockBuilder, shape: tuple[int, ...], places: tuple[int, ...]) -> tvm.IRModule:
    """A block, and a head that reads the tokens at places that an input says, counted as models do: behind all else,
    and from the end where they are negative."""
    x, ends = relax.Var("x", R.Tensor(shape, "float32")), relax.Var("ends", R.Tensor(places, "int64"))
    with builder.function("main", [x, ends]):
        with builder.dataflow():
            emit = builder.emit
            tokens = block(emit, emit(op.tanh(x)), shape[0])
            back = emit(op.less(ends, relax.const(0, "int64")))
            found = emit(op.where(back, emit(op.add(ends, relax.const(TOKENS, "int64"))), ends))
            out = builder.emit_output(linear(emit, emit(op.take(tokens, found, axis=1, mode="clip")), 3))
        builder.emit_func_output(out)
    return builder.finalize()


def test_last_block_is_computed_of_tokens_that_each_call_chooses() -> None:
    batch, places = 2, (1, 3)
    before = chosen(relax.BlockBuilder(), (batch, TOKENS, WIDTH), places)
    after = DropUnread(before)
    count = math.prod(places)
    rows, some = batch * TOKENS * WIDTH, batch * count * WIDTH
    assert elements(after, "matmul")[:-1] == [
        some, rows, rows, batch * HEADS * TOKENS * count, some, some, 4 * some, some]
    x = RNG.standard_normal((batch, TOKENS, WIDTH)).astype("float32")
    ends = np.resize([-2, 5, 3 * TOKENS], places)  # beyond the end is the last
    for old, new in zip(evaluate(before, x, ends), evaluate(after, x, ends), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5)
    assert DropUnread(after).same_as(after)


def test_places_that_differ_or_depend_on_what_is_read_leave_it_whole() -> None:
    @R.function(private=True)
    def differ(x: R.Tensor((16, 8), "float32"), i: R.Tensor((2,), "int64"), j: R.Tensor((2,), "int64")):
        with R.dataflow():
            a = R.tanh(x)
            b = R.take(a, i, axis=0, mode="clip")
            c = R.take(a, j, axis=0, mode="clip")
            y = R.add(b, c)
            R.output(y)
        return y

    @R.function(private=True)
    def own(x: R.Tensor((16, 8), "float32")):
        with R.dataflow():
            a = R.tanh(x)
            i = R.argmax(a, axis=0)
            y = R.take(a, i, axis=0, mode="clip")
            R.output(y)
        return y

    for func in (differ, own):
        assert_unchanged(DropUnread, func)


def test_filters_are_not_chosen_at_run_time() -> None:
    """They are packed when the model is built."""
    @R.function(private=True)
    def columns(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 64), "float32"), i: R.Tensor((2,), "int64")):
        with R.dataflow():
            a = R.matmul(x, w)
            y = R.take(a, i, axis=1, mode="clip")
            R.output(y)
        return y

    assert_unchanged(DropUnread, columns)


def test_readers_of_different_parts() -> None:
    """One function is computed of the rows that either reader needs, another of those of its only one."""
    @R.function(private=True)
    def before(x: R.Tensor((16, 8), "float32")):
        with R.dataflow():
            a = R.tanh(x)
            b = R.exp(a)
            c = R.strided_slice(b, axes=[0], begin=[2], end=[4])
            d = R.strided_slice(a, axes=[0], begin=[3], end=[5])
            y = R.add(c, d)
            R.output(y)
        return y

    after = DropUnread(module(before))
    assert_same_values(before, after)
    assert elements(after, "tanh") == [3 * 8] and elements(after, "exp") == [2 * 8]


def test_nothing_is_done_where_nearly_all_is_read() -> None:
    @R.function(private=True)
    def parts(x: R.Tensor((16, 8), "float32")):
        with R.dataflow():
            a = R.tanh(x)
            b = R.strided_slice(a, axes=[0], begin=[0], end=[1])
            c = R.strided_slice(a, axes=[0], begin=[15], end=[16])
            y = R.add(b, c)
            R.output(y)
        return y

    @R.function(private=True)
    def most(x: R.Tensor((16, 8), "float32")):
        with R.dataflow():
            a = R.tanh(x)
            y = R.strided_slice(a, axes=[0], begin=[0], end=[15])
            R.output(y)
        return y

    @R.function(private=True)
    def result(x: R.Tensor((16, 8), "float32")):
        with R.dataflow():
            a = R.tanh(x)
            b = R.strided_slice(a, axes=[0], begin=[0], end=[1])
            R.output(a, b)
        return a, b

    for func in (parts, most, result):
        assert_unchanged(DropUnread, func)


def test_an_axis_of_free_size_is_cut_by_numbers_and_left_whole() -> None:
    rows = tirx.Var("batch", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, TOKENS, WIDTH), "float32"))
    with scope({"batch": Free("batch", Range(1, 8), 4)}):
        with builder.function("main", [x]):
            with builder.dataflow():
                y = linear(builder.emit, x, WIDTH)
                out = builder.emit_output(op.strided_slice(y, [1], [0], [1]))
            builder.emit_func_output(out)
        after = DropUnread(builder.finalize())
        [product] = [b.var for b in bindings(after["main"]) if op_name(b.value) == "relax.matmul"]
        assert shape_of(product)[1:] == (1, WIDTH)


# -- random networks


class Chance:
    """A network of random operators of which a random part is read."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        emit, known = builder.emit, [x]
        steps = [self.pointwise, self.joined, self.product, self.columns, self.permuted, self.reshaped, self.along,
                 self.reduced, self.concatenated, self.part, self.taken, self.convolved]
        ends = {x: x}
        self.places = emit(op.argmax(x, axis=2))
        for step in self.rng.choice(len(steps), 10):
            operand = known[-1 - int(self.rng.integers(min(2, len(known))))]
            known.append(steps[step](emit, operand, shape_of(operand)))
            ends.pop(operand, None)
            ends[known[-1]] = known[-1]
        return emit(relax.Tuple([self.cut(emit, each, shape_of(each)) for each in ends]))

    def cut(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        axis = int(self.rng.integers(len(shape)))
        begin = int(self.rng.integers(shape[axis]))
        end = int(self.rng.integers(begin, min(shape[axis], begin + 2))) + 1
        return emit(op.strided_slice(x, [axis], [begin], [end]))

    def part(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        axis = int(self.rng.integers(len(shape)))
        return emit(op.strided_slice(x, [axis], [int(self.rng.integers(shape[axis]))], [shape[axis]],
                                     [int(self.rng.integers(1, 3))]))

    def pointwise(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        return emit(self.rng.choice([op.tanh, op.sigmoid, op.nn.relu])(x))

    def joined(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        other = [size if self.rng.integers(2) else 1 for size in shape][int(self.rng.integers(len(shape))):]
        return emit(op.add(x, weight(*other)) if self.rng.integers(2) else op.multiply(weight(*other), x))

    def product(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        if len(shape) < 2:
            return self.pointwise(emit, x, shape)
        return emit(op.matmul(x, weight(shape[-1], int(self.rng.integers(2, 7)))))

    def columns(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        if len(shape) < 2:
            return self.pointwise(emit, x, shape)
        return emit(op.matmul(weight(*(size if self.rng.integers(2) else 1 for size in shape[:-2]), 5, shape[-2]), x))

    def permuted(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        return emit(op.permute_dims(x, [int(axis) for axis in self.rng.permutation(len(shape))]))

    def reshaped(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        axis = int(self.rng.integers(len(shape)))
        size = shape[axis]
        factor = int(self.rng.choice([f for f in range(1, size + 1) if size % f == 0]))
        new = [*shape[:axis], factor, size // factor, *shape[axis + 1 :]]
        while len(new) > 4 or (len(new) > 1 and self.rng.integers(2)):
            place = int(self.rng.integers(len(new) - 1))
            new[place : place + 2] = [new[place] * new[place + 1]]
        return emit(op.reshape(x, new))

    def along(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        if self.rng.integers(2):
            return emit(op.nn.softmax(x, axis=int(self.rng.integers(len(shape)))))
        return emit(op.nn.layer_norm(x, weight(shape[-1]), weight(shape[-1]), axes=[-1], epsilon=1.0))

    def reduced(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        if len(shape) < 2:
            return self.pointwise(emit, x, shape)
        reduce = self.rng.choice([op.sum, op.mean, op.max])
        return emit(reduce(x, axis=[int(self.rng.integers(len(shape)))], keepdims=bool(self.rng.integers(2))))

    def concatenated(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        axis = int(self.rng.integers(len(shape)))
        other = emit(op.tanh(weight(*shape[:axis], 3, *shape[axis + 1 :])))
        return emit(op.concat([other, x, emit(op.exp(emit(op.tanh(x))))], axis=axis))

    def taken(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        axis = int(self.rng.integers(len(shape)))
        some = self.rng.integers(shape[axis], size=() if self.rng.integers(2) and len(shape) > 1 else 3)
        if self.rng.integers(2):  # at places that depend on the input, some behind the end
            few = emit(op.strided_slice(self.places, [0, 1], [0, 0], [1, 2 if np.ndim(some) else 1]))
            return emit(op.take(x, emit(op.reshape(few, np.shape(some) and (2,))), axis=axis, mode="clip"))
        return emit(op.take(x, relax.const(np.asarray(some, "int64")), axis=axis, mode="clip"))

    def convolved(self, emit: Emit, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        if len(shape) != 3:
            return self.pointwise(emit, x, shape)
        return emit(op.nn.conv1d(x, weight(6, shape[1], 1)))


@pytest.mark.parametrize("seed", range(12))
def test_random_networks_keep_their_values(seed: int) -> None:
    before = network((4, 6, 8), Chance(seed))
    after = DropUnread(before)
    assert not after.same_as(before)
    x = RNG.standard_normal((4, 6, 8)).astype("float32")
    for old, new in zip(evaluate(before, x), evaluate(after, x), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(old).max())))


# -- the laws, proved for all sizes

ROWS, MIDDLE = "axis=0, begin=i, end=i+j", "axis=1, begin=i, end=i+j"
LAWS = {
    "elementwise": ("x[i+j+k,m] y[i+j+k,m]", f"slice(add(tanh(x), y), {ROWS})",
                    f"add(tanh(slice(x, {ROWS})), slice(y, {ROWS}))"),
    "broadcast": ("x[i+j+k,m] y[1,m]", f"slice(mul(x, y), {ROWS})", f"mul(slice(x, {ROWS}), y)"),
    "rows": ("x[i+j+k,m] y[m,n]", f"slice(matmul(x, y), {ROWS})", f"matmul(slice(x, {ROWS}), y)"),
    "columns": ("x[n,m] y[m,i+j+k]", f"slice(matmul(x, y), {MIDDLE})", f"matmul(x, slice(y, {MIDDLE}))"),
    "batch": ("x[i+j+k,n,m] y[i+j+k,m,l]", f"slice(matmul(x, y), {ROWS})",
              f"matmul(slice(x, {ROWS}), slice(y, {ROWS}))"),
    "filters": ("x[n,c,h,w] y[i+j+k,c,r,s]", f"slice(conv2d(x, y), {MIDDLE})", f"conv2d(x, slice(y, {ROWS}))"),
    "images": ("x[i+j+k,c,h,w] y[o,c,r,s]", f"slice(conv2d(x, y), {ROWS})", f"conv2d(slice(x, {ROWS}), y)"),
    "softmax": ("x[i+j+k,m]", f"slice(softmax(x, axis=1), {ROWS})", f"softmax(slice(x, {ROWS}), axis=1)"),
    "norm": ("x[i+j+k,m] s[m] b[m]", f"slice(layer_norm(x, s, b), {ROWS})", f"layer_norm(slice(x, {ROWS}), s, b)"),
    "scale": ("x[i+j+k,m] s[m]", f"slice(rms_norm(x, s), {ROWS})", f"rms_norm(slice(x, {ROWS}), s)"),
    "mean": ("x[n,i+j+k,m]", f"slice(mean(x, axes=(2,)), {MIDDLE})", f"mean(slice(x, {MIDDLE}), axes=(2,))"),
    "transpose": ("x[n,i+j+k]", f"slice(transpose(x, perm=(1,0)), {ROWS})",
                  f"transpose(slice(x, {MIDDLE}), perm=(1,0))"),
    "reshape": ("x[(i+j+k)*m,n]", f"slice(reshape(x, shape=(i+j+k,m,n)), {ROWS})",
                "reshape(slice(x, axis=0, begin=i*m, end=i*m+j*m), shape=(j,m,n))"),
    "concat": ("x[n,m] y[i+j+k,m]", "slice(concat(x, y, axis=0), axis=0, begin=n+i, end=n+i+j)", f"slice(y, {ROWS})"),
    "both parts": ("x[i+j,m] y[k+l,m]", "slice(concat(x, y, axis=0), axis=0, begin=i, end=i+j+k)",
                   "concat(slice(x, axis=0, begin=i, end=i+j), slice(y, axis=0, begin=0, end=k), axis=0)"),
}


#: what may be taken at places that are known when the model runs
PLACED = ("elementwise", "broadcast", "rows", "batch", "images", "softmax", "norm", "scale", "mean", "transpose")


@pytest.mark.parametrize("name", LAWS)
def test_law_is_proved(name: str) -> None:
    assert rule(name, *LAWS[name]).certificate is not None


@pytest.mark.parametrize("name", PLACED)
def test_law_holds_at_every_single_place(name: str) -> None:
    """Hence of what is taken: a concatenation of the elements at some places."""
    texts = (text.replace("begin=i, end=i+j", "begin=i-1, end=i").replace("i+j+k", "i+k-1") for text in LAWS[name])
    assert rule(name, *texts).certificate is not None
