"""Softmax, norms, GELU and SiLU in the rules: what is repeated or split in parts is computed once, or all at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from relax_evaluation import assert_same_values, weight
from substitution_rules import rule
from test_substitution_search import CPU, network, prepared
from tvm import relax
from tvm.relax import op

from mlc.graph.substitute.check import difference, identical
from mlc.graph.substitute.read import read
from mlc.graph.substitute.rules import shipped_patterns
from mlc.graph.substitute.search import Candidate, Options, search
from mlc.graph.substitute.write import write
from mlc.substitution.codec import RuleError

Emit = Callable[[relax.Expr], relax.Expr]
ROWS, WIDTH = 96, 64


def normed(emit: Emit, x: relax.Expr, epsilon: float = 1e-12) -> relax.Expr:
    return emit(op.nn.layer_norm(x, weight(WIDTH), weight(WIDTH), axes=[-1], epsilon=epsilon))


def searched(body: Callable[..., relax.Expr], **inputs: tuple[int, ...]) -> tuple[Candidate, Candidate]:
    """A network's own graph and the cheapest that was found, which are equal."""
    mod = prepared(network(inputs, body))
    found = search(mod, shipped_patterns(), CPU.tvm, Options())
    own, best = found.candidates[:2]
    assert difference(best.graph, own.graph) < 1e-9 and identical(best.graph, own.graph)
    assert_same_values(found.module(own), found.module(best), 1e-4)
    return own, best


def test_rows_of_what_is_repeated_are_computed_once() -> None:
    """A code beside every point of a shape, as decoders have it."""
    def body(emit: Emit, x: relax.Var, y: relax.Var) -> relax.Expr:
        code = emit(op.broadcast_to(x, (ROWS, WIDTH)))
        code = emit(op.nn.silu(normed(emit, code)))
        code = emit(op.nn.softmax(emit(op.nn.rms_norm(code, weight(WIDTH), axes=[-1])), axis=1))
        return emit(op.multiply(emit(op.nn.gelu(code)), y))

    own, best = searched(body, x=(1, WIDTH), y=(ROWS, WIDTH))
    names = ("layer_norm", "silu", "rms_norm", "softmax", "gelu")
    rows = [[term.shape[0] for term in each.graph.terms if term.op in names] for each in (own, best)]
    assert rows == [[ROWS] * 5, [1] * 5]


def test_what_is_added_to_all_of_a_row_is_not_seen() -> None:
    def body(emit: Emit, x: relax.Var, y: relax.Var) -> relax.Expr:
        return emit(op.matmul(x, normed(emit, emit(op.add(emit(op.tanh(x)), y)))))

    _, best = searched(body, x=(WIDTH, WIDTH), y=(WIDTH, 1))
    assert "add" not in {term.op for term in best.graph.terms}


@pytest.mark.parametrize("inputs, shifted, plain", [
    ("x[n,m] s[n,1]", "softmax(add(x, s), axis=1)", "softmax(x, axis=1)"),
    ("x[n,m] s[n,1] g[m] b[m]", "layer_norm(add(x, s), g, b)", "layer_norm(x, g, b)"),
])
def test_shifts_are_proved_and_scales_are_not(inputs: str, shifted: str, plain: str) -> None:
    """The small number in a norm tells its scale."""
    assert rule("shift", inputs, shifted, plain).certificate is not None
    with pytest.raises(RuleError, match="it is wrong"):
        rule("scale", inputs, shifted.replace("add", "mul"), plain)


@pytest.mark.parametrize("epsilon, axes, known", [
    (1e-5, [-1], True), (1e-12, [1], True), (0.3, [-1], False), (0.0, [-1], False), (1e-5, [0], False)])
def test_norms_are_read_as_they_are_written(epsilon: float, axes: list[int], known: bool) -> None:
    """One by epsilon is a whole number in the language; other norms stay as they are."""
    def body(emit: Emit, x: relax.Var) -> relax.Expr:
        return emit(op.nn.layer_norm(x, weight(WIDTH), weight(WIDTH), axes=axes, epsilon=epsilon))

    mod = prepared(network({"x": (WIDTH, WIDTH)}, body))
    reading = read(mod["main"])
    assert ("layer_norm" in {term.op for term in reading.graph.terms}) is known
    assert_same_values(mod, write(mod, reading, reading.graph), 1e-6)
