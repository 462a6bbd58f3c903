"""What the fixed rule sets of Grappler and XLA do is done here too: a network shows every row of the guide."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tvm
from relax_evaluation import assert_same_values, network, operators, weight
from tvm import relax
from tvm.relax import op

from mlc.graph.pipeline import lower, prepare
from mlc.graph.substitute.choose import Substitutions
from mlc.graph.substitute.rules import shipped_patterns
from mlc.graph.substitute.search import Options
from mlc.target import resolve

GUIDE = Path(__file__).parents[3] / "tutorials" / "guides" / "published_rewrites.md"
SHAPE = (4, 8, 16)

Emit = Callable[[relax.Expr], relax.Expr]
Body = Callable[[Emit, relax.Expr], relax.Expr]


@dataclass(frozen=True)
class Case:
    """A network of one input, and the operators that are left of it, in order."""

    row: str
    left: str
    body: Body
    shape: tuple[int, ...] = SHAPE


CASES: list[Case] = []


def case(row: str, left: str, shape: tuple[int, ...] = SHAPE) -> Callable[[Body], Body]:
    def enter(body: Body) -> Body:
        CASES.append(Case(row, left, body, shape))
        return body

    return enter


def number(value: float) -> relax.Expr:
    return relax.const(value, "float32")


def positive(*shape: int) -> relax.Expr:
    return weight(*shape, low=0.5, high=2.0)


def built(body: Body, shape: tuple[int, ...]) -> tvm.IRModule:
    return network(shape, lambda builder, x: body(builder.emit, x))


# -- constants


@case("constants gathered in sums and products", "add")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.subtract(e(op.add(x, weight(16))), weight(16)))


@case("constants gathered in sums and products", "multiply")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.divide(e(op.multiply(weight(16), x)), positive(16)))


@case("constants gathered across a subtraction or quotient", "subtract")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.subtract(weight(16), e(op.add(x, weight(16)))))


@case("constants gathered across a subtraction or quotient", "add")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.subtract(weight(16), e(op.subtract(weight(16), x))))


@case("constants gathered across a subtraction or quotient", "subtract")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.add(e(op.subtract(weight(16), x)), weight(16)))


@case("constants gathered across a subtraction or quotient", "exp divide")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.divide(weight(16), e(op.multiply(e(op.exp(x)), positive(16)))))


@case("constants among several operands", "tanh add add")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.add(e(op.add(e(op.add(x, weight(16))), e(op.tanh(x)))), weight(16)))


@case("constants among several operands", "tanh multiply multiply")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.multiply(e(op.multiply(e(op.tanh(x)), e(op.multiply(number(3.0), x)))), number(0.5)))


@case("constant parts of a concatenation", "concat")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    inner = e(op.concat([weight(4, 2, 16), x], axis=1))
    return e(op.concat([weight(4, 3, 16), inner], axis=1))


@case("constant condition of a selection", "exp")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.where(relax.const(np.zeros(SHAPE, bool)), x, e(op.exp(x))))


# -- elements that change nothing


@case("neutral elements", "tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    for build, neutral in ((op.multiply, 1.0), (op.add, 0.0), (op.subtract, 0.0), (op.divide, 1.0), (op.power, 1.0)):
        x = e(build(x, number(neutral)))
    return e(op.tanh(x))


@case("involutions", "exp tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    x = e(op.exp(e(op.negative(e(op.negative(x))))))
    return e(op.tanh(e(op.divide(number(1.0), e(op.divide(number(1.0), x))))))


@case("involutions", "greater where")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    mask = e(op.logical_not(e(op.logical_not(e(op.greater(x, number(0.0)))))))
    return e(op.where(mask, x, number(3.0)))


@case("involutions", "tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.tanh(e(op.flip(e(op.flip(x, 1)), 1))))


@case("idempotence", "nn.relu floor tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    for build in (op.nn.relu, op.nn.relu, op.abs, op.abs, op.floor, op.floor):
        x = e(build(x))
    return e(op.tanh(e(op.maximum(x, x))))


@case("idempotence", "sigmoid")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.nn.relu(e(op.sigmoid(x))))


@case("idempotence", "clip tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.tanh(e(op.clip(e(op.clip(x, -1.0, 6.0)), 0.0, 0.75))))


@case("negations", "tanh add")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.subtract(x, e(op.negative(e(op.tanh(x))))))


@case("negations", "tanh subtract")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.add(e(op.negative(e(op.tanh(x)))), x))


@case("negations", "tanh exp multiply abs")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    both = e(op.multiply(e(op.negative(e(op.tanh(x)))), e(op.negative(e(op.exp(x))))))
    return e(op.abs(e(op.negative(both))))


@case("casts", "tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.tanh(e(op.astype(e(op.astype(x, "float64")), "float32"))))


# -- factors and broadcasts


@case("common factors", "tanh exp add multiply")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    left, right = e(op.multiply(e(op.tanh(x)), x)), e(op.multiply(x, e(op.exp(x))))
    return e(op.add(left, right))


@case("the smaller operand first", "mean max multiply multiply")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    small, other = e(op.mean(x, axis=[0, 1], keepdims=True)), e(op.max(x, axis=[0, 1], keepdims=True))
    return e(op.multiply(e(op.multiply(x, small)), other))


@case("functions before a broadcast", "tanh add", shape=(1, 1, 16))
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    spread = e(op.broadcast_to(e(op.broadcast_to(x, (1, 8, 16))), (4, 8, 16)))
    return e(op.add(e(op.tanh(spread)), weight(4, 8, 16)))


@case("powers", "multiply multiply")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.power(x, number(3.0)))


# -- reductions


@case("reductions of reductions", "sum")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.sum(e(op.sum(x, axis=2)), axis=0))


@case("reductions of reductions", "mean")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.mean(e(op.mean(x, axis=1, keepdims=True)), axis=[2], keepdims=True))


@case("reductions over one element", "tanh reshape", shape=(4, 1, 16))
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.tanh(e(op.max(e(op.sum(x, axis=1, keepdims=True)), axis=1))))


@case("monotone functions after a maximum", "max exp")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.max(e(op.exp(x)), axis=2))


@case("monotone functions after a maximum", "nn.max_pool2d tanh", shape=(1, 8, 12, 12))
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.nn.max_pool2d(e(op.tanh(x)), (3, 3), (2, 2), padding=(1, 1, 1, 1)))


@case("logarithm of a softmax", "nn.log_softmax")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.log(e(op.nn.softmax(x, -1))))


# -- movement


@case("transposes and reshapes that cancel", "tanh tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    moved = e(op.permute_dims(e(op.tanh(e(op.permute_dims(x, [0, 2, 1])))), [0, 2, 1]))
    return e(op.tanh(e(op.reshape(e(op.reshape(moved, (4, 128))), SHAPE))))


@case("slices of slices", "strided_slice tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    first = e(op.strided_slice(x, [1], [1], [8], [2]))  # 1, 3, 5, 7
    return e(op.tanh(e(op.strided_slice(first, [1], [1], [4]))))


@case("slices of slices", "tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.tanh(e(op.strided_slice(x, [1], [0], [8]))))


@case("slices of what was joined", "exp strided_slice tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    joined = e(op.concat([e(op.matmul(x, weight(16, 16))), e(op.exp(x))], axis=1))
    return e(op.tanh(e(op.strided_slice(joined, [1], [9], [16]))))


@case("slices of what was joined", "exp tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    stacked = e(op.stack([x, e(op.exp(x))], axis=1))
    return e(op.tanh(e(op.squeeze(e(op.strided_slice(stacked, [1], [1], [2])), [1]))))


@case("parts joined again", "tanh")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    parts = e(op.split(x, 4, axis=2))
    return e(op.tanh(e(op.concat([e(relax.TupleGetItem(parts, i)) for i in range(4)], axis=2))))


@case("slices of what is computed", "strided_slice exp nn.softmax")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.strided_slice(e(op.nn.softmax(e(op.exp(x)), axis=-1)), [1], [3], [4]))


@case("parts joined again", "strided_slice concat")
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    parts = e(op.split(x, 4, axis=2))
    return e(op.concat([e(relax.TupleGetItem(parts, i)) for i in (1, 2)] + [weight(4, 8, 4)], axis=2))


@case("padding before a convolution", "nn.conv2d", shape=(1, 8, 12, 12))
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.nn.conv2d(e(op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1])), weight(16, 8, 3, 3)))


# -- products


@case("scale before a product", "nn.conv2d", shape=(1, 8, 12, 12))
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    return e(op.nn.conv2d(e(op.multiply(x, weight(8, 1, 1))), weight(16, 8, 3, 3), padding=(1, 1)))


@case("batch normalisation after a product", "nn.conv2d add nn.relu", shape=(1, 8, 12, 12))
def _(e: Emit, x: relax.Expr) -> relax.Expr:
    y = e(op.add(e(op.nn.conv2d(x, weight(16, 8, 3, 3), padding=(1, 1))), weight(1, 16, 1, 1)))
    y = e(op.nn.batch_norm(y, weight(16), weight(16), weight(16), positive(16), axis=1, training=False))
    return e(op.nn.relu(e(relax.TupleGetItem(y, 0))))


def identifier(each: Case) -> str:
    return f"{each.row}-{CASES.index(each)}"


def prepared(mod: tvm.IRModule) -> tvm.IRModule:
    """The module before substitutions and layouts."""
    target = resolve("x86-64-v3")
    with target.tvm:
        for step in prepare(target):
            mod = step(mod)
    return mod


@pytest.mark.parametrize("each", CASES, ids=identifier)
def test_named_pass(each: Case) -> None:
    before = built(each.body, each.shape)
    after = prepared(before)
    assert " ".join(operators(after)) == each.left
    assert_same_values(before, after, 1e-5)


# -- by proved rules: the kernels that are left


def kernels(mod: tvm.IRModule) -> list[str]:
    """The names of the tensor functions that main calls."""
    calls = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    return [call.args[0].name_hint for call in calls if isinstance(call, relax.Call) and "call_tir" in call.op.name]


def _two_products(combine: Callable[[Emit, Sequence[relax.Expr]], relax.Expr]) -> Body:
    def body(e: Emit, x: relax.Expr) -> relax.Expr:
        return combine(e, [e(op.matmul(x, weight(64, 96))) for _ in range(2)])

    return body


PROVED: dict[str, Body] = {
    "products of one operand, added": _two_products(lambda e, y: e(op.add(*y))),
    "functions hoisted out of a concatenation": _two_products(
        lambda e, y: e(op.concat([e(op.tanh(each)) for each in y], axis=1))
    ),
}


@pytest.mark.parametrize("row", PROVED)
def test_proved_rule(row: str) -> None:
    before = built(PROVED[row], (64, 64))
    rules = Substitutions(shipped_patterns(), Options())
    target = resolve("x86-64-v3")
    assert len(kernels(lower(before, target).module)) > 1
    after = lower(before, target, substitutions=rules)
    assert len(kernels(after.module)) == 1, kernels(after.module)
    assert_same_values(before, after.module, 1e-5)


def test_the_guide_lists_what_is_tested() -> None:
    rows = re.findall(r"^\| ([^|]+?) +\|.*\| (?:pass|rule)[: ]", GUIDE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted({each.row for each in CASES} | set(PROVED))


# -- what is left alone, as values would change


@pytest.mark.parametrize("build", [
    lambda e, x: e(op.multiply(e(op.tanh(x)), number(0.0))),   # not 0 where x is not finite
    lambda e, x: e(op.subtract(x, x)),
    lambda e, x: e(op.log(e(op.exp(x)))),                      # finite where exp overflows
    lambda e, x: e(op.astype(e(op.astype(x, "float16")), "float32")),
    lambda e, x: e(op.clip(e(op.floor(e(op.clip(x, 0.0, 6.0)))), 0.0, 6.0)),
    lambda e, x: e(op.flip(e(op.flip(x, 1)), 2)),
    lambda e, x: e(op.max(e(op.negative(x)), axis=1)),
    lambda e, x: e(op.sum(e(op.max(x, axis=1)), axis=1)),
], ids=["times-0", "difference", "log-exp", "narrowed", "clip-floor", "flip", "max-of-falling", "sum-of-max"])
def test_left_alone(build: Body) -> None:
    before = built(build, SHAPE)
    assert operators(prepared(before)) == operators(before)


def test_what_others_read_too_is_not_computed_twice() -> None:
    def body(e: Emit, x: relax.Expr) -> relax.Expr:
        grown = e(op.exp(x))
        return e(op.add(e(op.max(grown, axis=2, keepdims=True)), grown))

    assert operators(prepared(built(body, SHAPE))) == ["exp", "max", "add"]
