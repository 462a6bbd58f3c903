"""Extraction against enumeration of every choice, on small random e-graphs with shared classes and cycles."""

from __future__ import annotations

import itertools
import random

import pytest

from mlc.graph.substitute.costs import Cost
from mlc.graph.substitute.extract import Problem, as_terms, extract, greedy
from mlc.graph.substitute.saturate import Choices
from mlc.substitution.egraph import ENode

LEAF = ENode("input", (), (("id", 0),))


def random_problem(seed: int) -> Problem:
    """Six to eight classes of up to three options each, which may read any class; the last class is the output."""
    rng = random.Random(seed)
    count = rng.randint(6, 8)
    options: dict[int, tuple[ENode, ...]] = {0: (LEAF,)}
    costs: dict[ENode, Cost] = {LEAF: Cost(0.0)}
    original: dict[int, ENode] = {0: LEAF}
    for each in range(1, count):
        own = []
        for place in range(rng.randint(1, 3)):
            below = range(each) if place == 0 else [c for c in range(count) if c != each]  # later ones make cycles
            inputs = tuple(rng.choice(list(below)) for _ in range(rng.randint(1, 2)))
            option = ENode(rng.choice(("matmul", "add", "slice")), inputs, (("tag", (each, place)),))
            heavy = option.op == "matmul"
            costs[option] = Cost(rng.uniform(1, 9) * 1e-6 if heavy else rng.uniform(0, 1) * 1e-6,
                                 fusable=option.op != "slice", alone=3e-6 if option.op == "add" else 0.0)
            own.append(option)
        options[each], original[each] = tuple(own), own[0]
    choices = Choices(options, dict.fromkeys(options, (4, 4)), frozenset(), (count - 1, count - 2), original)
    return Problem(choices, lambda option, _shape: costs[option], lambda _shape: 0.0)


def every_choice(problem: Problem) -> float:
    """The least cost of any choice without cycles."""
    best = float("inf")
    classes = list(problem.options)
    for picked in itertools.product(*(problem.options[each] for each in classes)):
        try:
            best = min(best, problem.seconds(dict(zip(classes, picked, strict=True))))
        except (KeyError, ValueError):
            continue
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_program_finds_the_cheapest_choice(seed: int) -> None:
    problem = random_problem(seed)
    found = extract(problem).choices[0]
    assert found.seconds == pytest.approx(every_choice(problem), rel=6e-3)
    assert found.seconds <= problem.seconds(greedy(problem)) * (1 + 1e-9)
    assert found.seconds <= problem.seconds(problem.choices.original) * (1 + 1e-9)
    as_terms(problem, found.pick)  # no cycle


@pytest.mark.parametrize("seed", range(10))
def test_choices_differ_in_their_products_and_come_in_order(seed: int) -> None:
    problem = random_problem(seed)
    found = extract(problem, count=3).choices
    assert [e.seconds for e in found] == sorted(e.seconds for e in found)
    products = [
        frozenset((c, e.pick[c]) for c in problem.needed(e.pick) if e.pick[c].op == "matmul") for e in found
    ]
    assert all(len(each) == 0 or products.count(each) == 1 for each in products)


def test_some_of_these_graphs_have_cycles_and_beat_greed() -> None:
    problems = [random_problem(seed) for seed in range(40)]
    assert any(extract(p).choices[0].seconds < 0.99 * p.seconds(greedy(p)) for p in problems)
    cyclic = 0
    for problem in problems:
        for picked in itertools.product(*(problem.options[each] for each in problem.options)):
            try:
                problem.needed(dict(zip(problem.options, picked, strict=True)))
            except ValueError:
                cyclic += 1
                break
    assert cyclic > 5


@pytest.mark.parametrize("stopped", ["work", "seconds"])
def test_without_work_or_time_greed_or_the_model_has_to_do(stopped: str) -> None:
    problem = random_problem(3)
    found = extract(problem, **{stopped: 0.0})  # type: ignore[arg-type]
    assert (found.stopped, found.work) == (stopped, 0.0 if stopped == "work" else found.work)
    assert found.choices[0].how in ("greedy", "original")
    assert found.choices[0].seconds <= problem.seconds(problem.choices.original)
