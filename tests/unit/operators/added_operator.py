"""Run as a program: two operators are added, each by its entry alone, before anything reads the table. What the rest
of the compiler then makes of them is printed as JSON."""

# ruff: noqa: E402 (the entries come before whatever reads the table)

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mlc.operators.laws import Laws
from mlc.operators.pointwise import function, pointwise
from mlc.operators.scalar import Mul

# the entries: a polynomial, and a function of which laws are known
pointwise("square", lambda x: Mul((x, x)), relax="square")
function(
    "atan", np.arctan, Laws("the derivative 1 / (1 + x^2) is positive and even", monotone=True, odd=True, zero=True),
    relax="atan", tame=True,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from relax_evaluation import evaluate, network
from substitution_rules import rule
from tvm import relax
from tvm.relax import op

from mlc.graph.layout.regions import UNARY
from mlc.graph.simplify.sinking import SinkMovement
from mlc.graph.substitute.costs import Costs
from mlc.graph.substitute.match import Pattern
from mlc.graph.substitute.read import read
from mlc.graph.substitute.search import Options, search
from mlc.operators.arithmetic import FIELD
from mlc.operators.evaluate import evaluate as value_of
from mlc.substitution.check import CertificateError, check_rule, maxima
from mlc.substitution.egraph import ENode
from mlc.substitution.fingerprint import agree
from mlc.substitution.prove import Refuted, certified, prove
from mlc.substitution.refute import find_counterexample
from mlc.substitution.rule import Rule
from mlc.target import resolve

TARGET = resolve("x86-64-v3", threads=2)


def holds(proposed: Rule) -> bool:
    """Whether the rule's certificate checks, its sides agree in the field, and no counterexample is found."""
    sizes = {"m": 3, "k": 4, "a": 2, "b": 3}
    return checks(proposed) and find_counterexample(proposed) is None and agree(proposed, sizes)


def checks(proposed: Rule) -> bool:
    try:
        check_rule(proposed)
    except CertificateError:
        return False
    return True


EVEN = rule("even", "x[m,k]", "square(neg(x))", "square(x)")
JOINED = rule("joined", "x[m,a] y[m,b]", "concat(atan(x), atan(y), axis=1)", "atan(concat(x, y, axis=1))")
GROWS = rule("grows", "x[m,k]", "atan(max(x, axes=(1,)))", "max(atan(x), axes=(1,))", proved=False)
WRONG = rule("wrong", "x[m,k]", "atan(neg(x))", "atan(x)", proved=False)


def searched() -> dict[str, Any]:
    """A model with both operators, on which a rule fires, and the constants of which are folded."""
    number = relax.const(np.full((8, 16), 3.0, "float32"))
    mod = network((8, 16), lambda builder, x: builder.emit(op.add(
        builder.emit(op.square(builder.emit(op.negative(builder.emit(op.atan(x)))))),
        builder.emit(op.square(builder.emit(op.atan(number)))),
    )))
    reading = read(mod["main"])
    found = search(mod, [Pattern(EVEN)], TARGET.tvm, Options())
    best = min(found.candidates, key=lambda each: each.estimate)
    written = found.module(best)
    x = np.random.default_rng(0).standard_normal((8, 16), dtype="float32")
    expected = np.arctan(x.astype(float)) ** 2 + np.arctan(3.0) ** 2
    return {
        "read": [term.op for term in reading.graph.terms],
        "taken": [term.op for term in best.graph.live().terms],
        "cheaper": best.estimate < found.candidates[0].estimate,
        "written": str(written["main"]).count("R.square"),
        "error": float(np.abs(evaluate(written, x)[0] - expected).max()),
    }


def priced() -> bool:
    """Whether the operator costs next to nothing behind another, and a kernel alone."""
    costs = Costs(TARGET.tvm, 0.0)
    square, relu = (costs.of(ENode(name, (0,), ()), (64, 64), {0: (64, 64)}, ()) for name in ("square", "relu"))
    return square == relu and square.fusable and square.alone > square.seconds


def sunk() -> str:
    """What is left of a transpose before the operator."""
    mod = SinkMovement(network((8, 16), lambda builder, x: builder.emit(
        op.atan(builder.emit(op.permute_dims(x, [1, 0])))
    )))
    return " ".join(binding.value.op.name for block in mod["main"].body.blocks for binding in block.bindings)


def evaluated() -> bool:
    """Whether both are what they should be, in float64 and exactly in the field."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal(50), FIELD.random(rng, (50,))
    [real], [exact] = value_of("atan", [x], {}), value_of("square", [y], {}, FIELD)
    return bool(np.array_equal(real, np.arctan(x)) and np.array_equal(exact, FIELD.mul(y, y)))


def main() -> None:
    found = {**searched(), "priced": priced(), "sunk": sunk(), "blocked": "relax.atan" in UNARY,
             "evaluated": evaluated(), "proved": [holds(EVEN), holds(JOINED)],
             "refuted": isinstance(prove(WRONG), Refuted)}
    by_law = certified(GROWS)
    found["granted"] = checks(by_law)
    # what the checker grants of functions is its own: a law of the table stands there too before a proof may use it
    maxima.GROWING |= {"atan"}
    found["granted then"] = checks(by_law) and holds(by_law)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
