"""Laws that are proved in cases and by sums within atoms: their proofs are checked, and their neighbours have none."""

from __future__ import annotations

import json
from functools import cache

import pytest

from mlc.substitution.check import CertificateError, check, check_rule
from mlc.substitution.codec import content_hash, dump_rule
from mlc.substitution.prove import Proved, certified, prove
from mlc.substitution.refute import Refuted, find_counterexample
from tests.unit.substitution.small_rules import BY_CASES, NEARLY


@cache
def right(name):
    return certified(BY_CASES[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BY_CASES)
def test_is_proved(name):
    check_rule(right(name))
    assert find_counterexample(BY_CASES[name], tries=20) is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NEARLY)
def test_its_neighbour_is_wrong_and_is_not_proved(name):
    assert isinstance(find_counterexample(NEARLY[name]), Refuted)
    assert not isinstance(prove(NEARLY[name], refute=False), Proved)


@pytest.mark.parametrize("name", NEARLY)
def test_its_neighbour_is_not_shown_by_its_certificate(name):
    data = dump_rule(NEARLY[name])
    data["certificate"] = dict(right(name).certificate) | {"rule": content_hash(NEARLY[name])}
    with pytest.raises(CertificateError):
        check(data)


def steps_in(value):
    """Every list of steps in a certificate that is not empty."""
    if isinstance(value, dict):
        for each in value.values():
            yield from steps_in(each)
    elif isinstance(value, list):
        if value and all(isinstance(each, list) and each and isinstance(each[0], str)
                         and each[0].replace(" ", "").isalpha() for each in value):
            yield value
        for each in value:
            yield from steps_in(each)


WORDS = ("case", "order", "void", "insert", "extract", "value", "lose", "parts", "loosen", "part", "climb", "given",
         "grow", "bound", "root", "above", "negate", "attain", "both", "each", "rise", "gentle")


def test_every_step_is_used_by_some():
    used = {step[0] for name in BY_CASES for steps in steps_in(dict(right(name).certificate)) for step in steps}
    assert set(WORDS) <= used


@pytest.mark.parametrize("name", BY_CASES)
def test_an_end_of_the_goal_is_needed(name):
    """A case that is left unproved, or a step that ends a goal left out, leaves terms."""
    text = json.dumps(right(name).certificate)
    count = sum(step[0] in ("case", "order", "void") for steps in steps_in(json.loads(text)) for step in steps)
    for place in range(count):
        for change in ("without", "one case", "no proof"):
            data = dump_rule(BY_CASES[name])
            data["certificate"] = json.loads(text)
            ends = [(steps, step) for steps in steps_in(data["certificate"]) for step in steps
                    if step[0] in ("case", "order", "void")]
            steps, step = ends[place]
            if change == "without" or step[0] == "void":
                steps.remove(step)
            elif change == "one case":
                step[-1].pop()
            elif step[-1] == [[], []]:
                continue
            else:
                step[-1] = [[] for _ in step[-1]]
            with pytest.raises(CertificateError):
                check(data)
