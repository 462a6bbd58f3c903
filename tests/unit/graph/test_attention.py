"""Attention is found with the movement around it, and what only looks like it is left alone."""

from __future__ import annotations

import pytest
import tvm
from relax_evaluation import assert_same_values, assert_unchanged, module, operators, weight
from tvm import relax
from tvm.script import relax as R

from mlc.graph.ir.rewrite import op_name
from mlc.graph.lowering.attention import FuseAttention
from mlc.target import resolve

FUSE = FuseAttention(resolve("native"))


def _calls(mod: tvm.IRModule) -> list[tuple[tuple[int, ...], ...]]:
    """The shapes of what each call of a tensor function reads and gives."""
    found = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call) and op_name(binding.value) == "relax.call_tir":
                parts = [*binding.value.args[1].fields, binding.var]
                found.append(tuple(tuple(int(d) for d in part.ty.shape.values) for part in parts))
    return found


def test_three_projections_become_one_and_nothing_is_moved() -> None:
    """BERT's: heads are split off and merged by transposes; the mask has a number for each key."""
    wq, wk, wv = weight(32, 32), weight(32, 32), weight(32, 32)
    bq, bv = weight(32), weight(32)

    @R.function(private=True)
    def before(x: R.Tensor((20, 32), "float32"), m: R.Tensor((1, 1, 1, 20), "float32")):
        with R.dataflow():
            q = R.permute_dims(R.reshape(R.add(R.matmul(x, wq), bq), (1, 20, 4, 8)), [0, 2, 1, 3])
            k = R.permute_dims(R.reshape(R.matmul(x, wk), (1, 20, 4, 8)), [0, 2, 3, 1])
            v = R.permute_dims(R.reshape(R.add(R.matmul(x, wv), bv), (1, 20, 4, 8)), [0, 2, 1, 3])
            s = R.add(R.multiply(R.matmul(q, k), R.const(0.35, "float32")), m)
            y = R.matmul(R.nn.softmax(s, axis=-1), v)
            z = R.reshape(R.permute_dims(y, [0, 2, 1, 3]), (20, 32))
            R.output(z)
        return z

    after = FUSE(module(before))
    assert operators(after) == ["matmul", "add", "reshape", "permute_dims", "call_tir", "reshape"]  # two for the mask
    assert _calls(after) == [((20, 96), (1, 1, 20, 1), (1, 20, 4, 8))]
    assert_same_values(before, after)


def test_slices_of_one_projection_and_a_causal_mask() -> None:
    """GPT-2's; the constant mask is turned over and padded to whole blocks of queries."""
    mask = weight(1, 1, 20, 20, low=-9.0, high=0.0)

    @R.function(private=True)
    def before(x: R.Tensor((1, 20, 96), "float32")):
        with R.dataflow():
            q = R.permute_dims(R.reshape(R.strided_slice(x, [2], [0], [32]), (1, 20, 4, 8)), [0, 2, 1, 3])
            k = R.permute_dims(R.reshape(R.strided_slice(x, [2], [32], [64]), (1, 20, 4, 8)), [0, 2, 3, 1])
            v = R.permute_dims(R.reshape(R.strided_slice(x, [-1], [-32], [96]), (1, 20, 4, 8)), [0, 2, 1, 3])
            s = R.add(mask, R.divide(R.matmul(q, k), R.const(2.8, "float32")))
            y = R.permute_dims(R.matmul(R.nn.softmax(s, axis=3), v), [0, 2, 1, 3])
            R.output(y)
        return y

    after = FUSE(module(before))
    assert operators(after) == ["call_tir"]
    assert _calls(after) == [((1, 20, 96), (1, 1, 20, 32), (1, 20, 4, 8))]
    assert_same_values(before, after)


def test_queries_keys_and_values_stacked_in_one_axis() -> None:
    """The vision transformer's; queries are scaled before the product, and nothing is masked."""

    @R.function(private=True)
    def before(x: R.Tensor((2, 17, 96), "float32")):
        with R.dataflow():
            t = R.permute_dims(R.reshape(x, (2, 17, 3, 4, 8)), [2, 0, 3, 1, 4])
            q = R.reshape(R.multiply(R.strided_slice(t, [0], [0], [1]), R.const(0.35, "float32")), (2, 4, 17, 8))
            k = R.reshape(R.strided_slice(t, [0], [1], [2]), (2, 4, 17, 8))
            v = R.reshape(R.strided_slice(t, [0], [2], [3]), (2, 4, 17, 8))
            p = R.nn.softmax(R.matmul(q, R.permute_dims(k, [0, 1, 3, 2])), axis=-1)
            y = R.matmul(p, v)
            R.output(y)
        return y

    after = FUSE(module(before))
    assert operators(after) == ["call_tir"]
    assert _calls(after) == [((2, 17, 96), (2, 4, 17, 8))]
    assert_same_values(before, after)


def test_shared_keys_of_three_axes_and_two_masks() -> None:
    """Keys and values broadcast over the heads, one mask a head scaled with the scores, another for each key."""

    @R.function(private=True)
    def before(
        q: R.Tensor((6, 9, 8), "float32"), k: R.Tensor((1, 5, 8), "float32"), v: R.Tensor((1, 5, 12), "float32"),
        m: R.Tensor((6, 1, 1), "float32"), n: R.Tensor((9, 5), "float32"),
    ):
        with R.dataflow():
            keys = R.permute_dims(R.broadcast_to(k, (6, 5, 8)), [0, 2, 1])
            s = R.multiply(R.add(R.matmul(q, keys), m), R.const(-0.5, "float32"))
            y = R.matmul(R.nn.softmax(R.add(s, n)), R.broadcast_to(v, (6, 5, 12)))
            R.output(y)
        return y

    after = FUSE(module(before))
    assert "softmax" not in " ".join(operators(after)) and "matmul" not in operators(after)
    assert _calls(after)[-1] == ((6, 9, 8), (1, 5, 8), (1, 5, 12), (6, 5, 16), (6, 9, 12))
    assert_same_values(before, after)


def test_projections_that_others_read_too_stay() -> None:
    wq, wk = weight(32, 32), weight(32, 32)

    @R.function(private=True)
    def before(x: R.Tensor((1, 16, 32), "float32")):
        with R.dataflow():
            q, k = R.matmul(x, wq), R.matmul(x, wk)
            y = R.matmul(R.nn.softmax(R.matmul(q, R.permute_dims(k, [0, 2, 1]))), x)
            z = R.add(y, q)
            R.output(z)
        return z

    after = FUSE(module(before))
    assert operators(after) == ["matmul", "matmul", "call_tir", "add"]
    assert_same_values(before, after)


def test_two_layers_make_their_mask_once() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 16, 8), "float32"), m: R.Tensor((16, 16), "float32")):
        with R.dataflow():
            a = R.matmul(R.nn.softmax(R.add(R.matmul(x, R.permute_dims(x, [0, 2, 1])), m)), x)
            b = R.matmul(R.nn.softmax(R.add(R.matmul(a, R.permute_dims(a, [0, 2, 1])), m)), a)
            R.output(b)
        return b

    after = FUSE(module(before))
    assert operators(after).count("permute_dims") == 1 and operators(after).count("call_tir") == 2
    assert_same_values(before, after)


def _near_miss(kind: str) -> relax.Function:
    """Softmax between two products, but with one thing that makes it no attention."""
    rows = 4 if kind == "few queries" else 16
    q, k, v = (relax.Var(name, R.Tensor(shape, "float32")) for name, shape in
               (("q", (2, rows, 8)), ("k", (2, 8, rows)), ("v", (2, rows, 6 if kind == "odd features" else 8))))
    bb = relax.BlockBuilder()
    with bb.function("main", [q, k, v], private=True):
        with bb.dataflow():
            s = bb.emit(relax.op.matmul(q, k))
            if kind == "scores of scores":
                s = bb.emit(relax.op.multiply(s, s))
            p = bb.emit(relax.op.nn.softmax(s, axis=1 if kind == "along the queries" else -1))
            if kind == "weights changed":
                p = bb.emit(relax.op.nn.relu(p))
            y = bb.emit(relax.op.matmul(p, v))
            y = bb.emit(relax.op.add(y, bb.emit(relax.op.matmul(s, v)))) if kind == "a score read again" else y
            result = bb.emit_output(y)
        bb.emit_func_output(result)
    return bb.finalize()["main"]


@pytest.mark.parametrize("kind", [
    "along the queries", "odd features", "scores of scores", "a score read again", "weights changed",
])
def test_near_misses(kind: str) -> None:
    assert_unchanged(FUSE, _near_miss(kind))


def test_targets_without_such_kernels_keep_their_operators() -> None:
    assert_unchanged(FuseAttention(resolve("cuda:sm_75")), _near_miss("none"))
    assert operators(FUSE(module(_near_miss("none")))) == ["call_tir"]


def test_few_queries_are_one_block_without_padding() -> None:
    before = _near_miss("few queries")
    after = FUSE(module(before))
    assert operators(after) == ["call_tir"] and _calls(after)[0][-1] == (2, 4, 8)
    assert_same_values(before, after)


@pytest.mark.parametrize("kind", ["both", "values only", "read again", "a part of the keys"])
def test_keys_and_values_that_are_results(kind: str) -> None:
    """The new ones are put behind the past where attention reads them; what is read otherwise, too, is made before."""
    q, k, v, past_k, past_v = (relax.Var(name, R.Tensor((1, 2, rows, 8), "float32")) for name, rows in
                               (("q", 3), ("k", 3), ("v", 3), ("past_k", 6), ("past_v", 6)))
    if kind == "a part of the keys":
        past_v = relax.Var("past_v", R.Tensor((1, 2, 4, 8), "float32"))
    bb, op = relax.BlockBuilder(), relax.op
    with bb.function("main", [q, k, v, past_k, past_v], private=True):
        with bb.dataflow():
            keys, values = (bb.emit(op.concat(pair, axis=2)) for pair in ((past_k, k), (past_v, v)))
            seen = bb.emit(op.strided_slice(keys, [2], [0], [7])) if kind == "a part of the keys" else keys
            scores = op.multiply(op.matmul(q, op.permute_dims(seen, [0, 1, 3, 2])), relax.const(0.35, "float32"))
            y = bb.emit(op.permute_dims(op.matmul(op.nn.softmax(scores), values), [0, 2, 1, 3]))
            more = [bb.emit(op.nn.relu(keys))] if kind == "read again" else []
            result = bb.emit_output(relax.Tuple([y, values] if kind == "values only" else [y, keys, values, *more]))
        bb.emit_func_output(result)
    before = module(bb.finalize()["main"])
    after = FUSE(before)
    assert operators(after).count("concat") == (0 if kind == "both" else 1)
    assert_same_values(before, after)
