"""The shipped rules before judges of another kind than the checker: Z3, and evaluation at random."""

from __future__ import annotations

import numpy as np
import pytest

from mlc.substitution.prove import Refuted
from mlc.substitution.ranks import instances as ranked
from mlc.substitution.refute import at_sizes, compared, draw_sizes
from mlc.substitution.shipped import shipped_rules
from tests.unit.graph.substitution_rules import rule
from tests.unit.substitution.smt import judgement, judgement_in_time

#: random instances of a rule, and at how many sizes they are drawn, where it has so many
_INSTANCES, _SIZES = 10_000, 100


def at_ranks(rules):
    """Rules, and those for many ranks at the lowest and the highest, 1 and 5 for most."""
    expanded = (ranked([one]) for one in rules)
    return [found for each in expanded for found in dict.fromkeys((each[0], each[-1]))]


def instances(one, number, most_sizes, seed=0):
    """What speaks against a rule in ``number`` instances: sizes that include 1, values that include 0, and undefined
    elements of what may have some."""
    rng = np.random.default_rng(seed)
    whole = set(one.certificate["whole"]["forward"])
    sizes = draw_sizes(one, most_sizes, seed)
    for numbers in sizes:
        solved = at_sizes(one, numbers)
        shapes = {name: tuple(int(d.constant or 0) for d in shape) for name, shape in solved.shapes.items()}
        for turn in range(-(-number // len(sizes))):
            given = {n: rng.integers(-2, 3, shape).astype(float) for n, shape in shapes.items()}
            spoilt = sorted(n for n, v in given.items() if n not in whole and v.size)
            if turn % 2 and spoilt:
                given[rng.choice(spoilt)].flat[0] = np.nan
            answer = compared(solved, numbers, given)
            if isinstance(answer, Refuted):
                yield answer


def judged(rules):
    found = [(each.name, judgement_in_time(each)) for each in rules]
    answered, given_up = sum(j.answered for _, j in found), sum(j.given_up for _, j in found)
    assert not [(name, j.against) for name, j in found if j.against]
    assert answered > 20 * given_up, f"Z3 gave up {given_up} questions and answered {answered}"


def test_z3_agrees_with_some_shipped_rules():
    judged(at_ranks(shipped_rules()[::60]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_z3_agrees_with_every_shipped_rule(part):
    judged(at_ranks(shipped_rules())[part::8])


def test_random_instances_of_some_shipped_rules():
    assert not [(one.name, found) for one in at_ranks(shipped_rules()[::20]) for found in instances(one, 24, 6)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_ten_thousand_random_instances_of_every_shipped_rule(part):
    assert not [(one.name, found) for one in at_ranks(shipped_rules())[part::8]
                for found in instances(one, _INSTANCES, _SIZES)]


@pytest.mark.parametrize("inputs, source, target", [
    ("x[n,m]", "relu(x)", "neg(x)"),
    ("x[n,n]", "x", "transpose(x, perm=(1,0))"),
    ("a[m,k] b[k,n]", "matmul(a, b)", "neg(matmul(a, b))"),
    ("x[n,m]", "slice(x, axis=0, begin=0, end=1)", "x"),
])
def test_z3_sees_what_is_wrong(inputs, source, target):
    """Values, reads, sums and sizes."""
    wrong = rule("wrong", inputs, f"relu({source})", f"relu({target})", proved=False)
    assert judgement(wrong).against
