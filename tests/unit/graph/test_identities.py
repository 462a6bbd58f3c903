"""Operators that change nothing disappear, and nothing else does."""

from __future__ import annotations

from relax_evaluation import assert_becomes, assert_unchanged
from tvm.script import relax as R

from mlc.graph.simplify import DropIdentities


def test_every_identity_goes() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.nn.dropout(x, rate=0.5)
            b = a[0]
            c = R.reshape(b, (2, 3))
            d = R.permute_dims(c, axes=[0, 1])
            e = R.add(d, R.const(0.0, "float32"))
            f = R.multiply(R.const(1.0, "float32"), e)
            g = R.astype(f, "float32")
            h = R.concat((g,), axis=1)
            i = R.nn.pad(h, pad_width=[0, 0, 0, 0])
            j = R.broadcast_to(i, (2, 3))
            k = R.divide(R.subtract(j, R.const(0.0, "float32")), R.const(1.0, "float32"))
            m = R.power(k, R.const(1.0, "float32"))
            y = R.nn.relu(R.nn.relu(m))
            R.output(y)
        return y

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            y = R.nn.relu(x)
            R.output(y)
        return y

    assert_becomes(DropIdentities, before, expected)


def test_what_only_looks_neutral_stays() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((1, 3), "float32"), n: R.Tensor((3,), "int32")):
        with R.dataflow():
            a = R.permute_dims(x)  # the order that is left out is reversed
            b = R.subtract(R.const(0.0, "float32"), a)
            c = R.divide(R.const(1.0, "float32"), b)
            d = R.add(c, R.zeros((3, 3), "float32"))
            e = R.multiply(d, R.const(2.0, "float32"))
            f = R.astype(n, "float32")
            g = R.add(e, f)
            h = R.broadcast_to(g, (3, 3))
            R.output(h)
        return h

    @R.function(private=True)
    def expected(x: R.Tensor((1, 3), "float32"), n: R.Tensor((3,), "int32")):
        with R.dataflow():
            a = R.permute_dims(x)
            b = R.subtract(R.const(0.0, "float32"), a)
            c = R.divide(R.const(1.0, "float32"), b)
            d = R.add(c, R.zeros((3, 3), "float32"))
            e = R.multiply(d, R.const(2.0, "float32"))
            f = R.astype(n, "float32")
            g = R.add(e, f)
            R.output(g)
        return g

    assert_becomes(DropIdentities, before, expected)


def test_a_zero_that_broadcasts_is_no_identity() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((3, 1), "float32")):
        with R.dataflow():
            y = R.add(x, R.const([0.0, 0.0], "float32"))
            R.output(y)
        return y

    assert_unchanged(DropIdentities, before)


def test_nothing_to_do_gives_the_same_module() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.nn.pad(x, pad_width=[0, 0, 1, 0])
            y = R.concat((a, a), axis=0)
            R.output(y)
        return y

    assert_unchanged(DropIdentities, before)


def test_empty_parts_of_a_concatenation_go() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 0), "float32")):
        with R.dataflow():
            a = R.concat((x, y), axis=1)
            b = R.concat((y, a, y, x), axis=1)
            R.output(b)
        return b

    @R.function(private=True)
    def expected(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 0), "float32")):
        with R.dataflow():
            b = R.concat((x, x), axis=1)
            R.output(b)
        return b

    assert_becomes(DropIdentities, before, expected)


def test_a_concatenation_of_nothing_stays() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 0), "float32")):
        with R.dataflow():
            y = R.concat((x, x), axis=1)
            R.output(y)
        return y

    assert_unchanged(DropIdentities, before)
