"""Keys and values of few queries: the same numbers by fewer multiplications, and the laws of it proved."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from relax_evaluation import RNG, assert_same_values, evaluate, operators, weight
from substitution_rules import rule
from tvm import relax
from tvm.relax import op

from mlc.graph.ir.rewrite import bindings, op_name, shape_of
from mlc.graph.pipeline import simplified
from mlc.graph.simplify import FewQueries

Emit = Callable[[relax.Expr], relax.Expr]
TOKENS, WIDTH, HEADS = 80, 128, 4
DEPTH = WIDTH // HEADS


def multiplications(mod: tvm.IRModule) -> int:
    """Of all products of matrices."""
    return sum(math.prod(shape_of(binding.var)) * shape_of(binding.value.args[0])[-1] for binding in
               bindings(mod["main"]) if isinstance(binding.value, relax.Call) and op_name(binding.value) ==
               "relax.matmul")


def linear(emit: Emit, x: relax.Expr, width: int, bias: bool = True) -> relax.Expr:
    product = emit(op.matmul(x, weight(int(x.ty.shape[-1]), width, low=-0.3, high=0.3)))
    return emit(op.add(product, weight(width))) if bias else product


class Attention:
    """Attention of ``queries`` learnt vectors for ``batch`` sequences. ``written`` is how keys and values come about:
    as ``apart`` or of ``one`` product, with the heads ``merged`` with the batch, or by ``columns`` of each head that
    are not next to each other. ``inside`` is what becomes of the scores."""

    def __init__(self, written: str = "apart", batch: int = 2, queries: int = 1, bias: bool = True,
                 inside: str = "softmax", returned: bool = False) -> None:
        self.written, self.batch, self.queries, self.bias = written, batch, queries, bias
        self.inside, self.returned = inside, returned

    def module(self) -> tvm.IRModule:
        builder = relax.BlockBuilder()
        tokens = relax.Var("x", relax.TensorType((self.batch, TOKENS, WIDTH), "float32"))
        asked = relax.Var("q", relax.TensorType((self.batch, self.queries, WIDTH), "float32"))
        with builder.function("main", [tokens, asked]):
            with builder.dataflow():
                result = builder.emit_output(self.body(builder.emit, tokens, asked))
            builder.emit_func_output(result)
        return builder.finalize()

    def body(self, emit: Emit, x: relax.Expr, asked: relax.Expr) -> relax.Expr:
        if self.written == "one":
            both = emit(op.reshape(linear(emit, x, 2 * WIDTH, self.bias), (self.batch, TOKENS, 2, HEADS, DEPTH)))
            both = emit(op.permute_dims(both, [2, 0, 3, 1, 4]))
            k, v = (emit(op.squeeze(emit(op.strided_slice(both, [0], [i], [i + 1])), [0])) for i in (0, 1))
            keys = k = emit(op.permute_dims(k, [0, 1, 3, 2]))
        else:
            rows = emit(op.reshape(x, (self.batch * TOKENS, WIDTH)))
            k, v = linear(emit, rows, WIDTH, self.bias), linear(emit, rows, WIDTH, self.bias)
            inner, orders = (HEADS, DEPTH), ([0, 2, 3, 1], [0, 2, 1, 3])
            if self.written == "columns":
                inner, orders = (DEPTH, HEADS), ([0, 3, 2, 1], [0, 3, 1, 2])
            keys = k
            k, v = (emit(op.permute_dims(emit(op.reshape(each, (self.batch, TOKENS, *inner))), order))
                    for each, order in zip((k, v), orders, strict=True))
        q = emit(op.permute_dims(emit(op.reshape(asked, (self.batch, self.queries, HEADS, DEPTH))), [0, 2, 1, 3]))
        if self.written == "merged":
            k, v, q = (emit(op.reshape(each, (self.batch * HEADS, *shape_of(each)[2:]))) for each in (k, v, q))
        scores = emit(op.multiply(emit(op.matmul(q, k)), relax.const(0.2, "float32")))
        if self.inside == "masked":
            scores = emit(op.add(scores, weight(1, 1, 1, TOKENS)))
        parts = emit(op.tanh(scores) if self.inside == "tanh" else op.nn.softmax(scores, axis=-1))
        mixed = emit(op.reshape(emit(op.matmul(parts, v)), (self.batch, HEADS, self.queries, DEPTH)))
        result = emit(op.reshape(emit(op.permute_dims(mixed, [0, 2, 1, 3])), (self.batch, self.queries, WIDTH)))
        return emit(relax.Tuple([result, keys])) if self.returned else result


@pytest.mark.parametrize("attention", [
    Attention("one", queries=3), Attention("columns", bias=False), Attention(batch=1, inside="masked"),
    Attention("merged", inside="tanh", queries=2),
], ids=lambda each: "-".join(map(str, vars(each).values())))
def test_keys_and_values_are_not_computed(attention: Attention) -> None:
    before = attention.module()
    after = FewQueries(before)
    assert_same_values(before, after, 2e-5)
    left = multiplications(after) / multiplications(before)
    # of each product by weights: the queries' share of it and the tokens for each head
    assert left < attention.queries * (1 / TOKENS + 1 / DEPTH) + 0.05
    assert FewQueries(after).same_as(after)


def test_it_is_one_pass_of_many() -> None:
    before = Attention("one", 1).module()
    assert multiplications(simplified(before)) == multiplications(FewQueries(before)) < 0.1 * multiplications(before)


def test_a_bias_of_keys_vanishes_in_a_softmax_alone() -> None:
    def kept(attention: Attention) -> int:
        return operators(FewQueries(attention.module())).count("matmul")

    assert kept(Attention(inside="tanh")) == kept(Attention()) + 1 == kept(Attention(bias=False)) + 1
    assert "sum" in operators(FewQueries(Attention(inside="tanh").module()))
    assert "sum" not in operators(FewQueries(Attention().module()))


@pytest.mark.parametrize("attention", [
    Attention(queries=TOKENS), Attention(queries=24, batch=1)], ids=["all", "half"])
def test_many_queries_are_left_alone(attention: Attention) -> None:
    mod = attention.module()
    assert FewQueries(mod).same_as(mod)


def test_keys_that_others_read_are_computed() -> None:
    """The values' product alone is taken in the other order."""
    before = Attention(returned=True).module()
    after = FewQueries(before)
    [x, q] = (RNG.standard_normal(shape_of(param)).astype("float32") for param in before["main"].params)
    for old, new in zip(evaluate(before, x, q), evaluate(after, x, q), strict=True):
        np.testing.assert_allclose(new, old, rtol=2e-5, atol=2e-5 * float(np.abs(old).max()))
    one = 2 * TOKENS * WIDTH**2
    assert one < multiplications(after) < 1.2 * one < 2 * one < multiplications(before)


LAWS = {
    "keys": ("q[h,m,d] x[n,k] w[k,h*d]",
             "matmul(q, transpose(reshape(matmul(x, w), shape=(n,h,d)), perm=(1,2,0)))",
             "reshape(matmul(reshape(matmul(q, transpose(reshape(w, shape=(k,h,d)), perm=(1,2,0))), shape=(h*m,k)),"
             " transpose(x, perm=(1,0))), shape=(h,m,n))"),
    "values": ("p[h,m,n] x[n,k] w[k,h*d]",
               "matmul(p, transpose(reshape(matmul(x, w), shape=(n,h,d)), perm=(1,0,2)))",
               "matmul(reshape(matmul(reshape(p, shape=(h*m,n)), x), shape=(h,m,k)),"
               " transpose(reshape(w, shape=(k,h,d)), perm=(1,0,2)))"),
    "bias of keys": ("q[h,m,d] y[n,h*d] b[1,h*d]",
                     "matmul(q, transpose(reshape(add(y, b), shape=(n,h,d)), perm=(1,2,0)))",
                     "add(matmul(q, transpose(reshape(y, shape=(n,h,d)), perm=(1,2,0))),"
                     " matmul(q, reshape(b, shape=(h,d,1))))"),
    "bias of values": ("p[h,m,n] y[n,h*d] b[1,h*d]",
                       "matmul(p, transpose(reshape(add(y, b), shape=(n,h,d)), perm=(1,0,2)))",
                       "add(matmul(p, transpose(reshape(y, shape=(n,h,d)), perm=(1,0,2))),"
                       " mul(sum(p, axes=(2,), keepdims=1), reshape(b, shape=(h,1,d))))"),
}


@pytest.mark.parametrize("name", LAWS)
def test_law_is_proved(name: str) -> None:
    assert rule(name, *LAWS[name]).certificate is not None
