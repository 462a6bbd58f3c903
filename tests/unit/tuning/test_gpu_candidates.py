"""Cost models know of a GPU's candidates what their loops do not say: tensor cores, stages, clusters, the order of
blocks."""

from __future__ import annotations

import math
import random
import shutil
from dataclasses import asdict
from itertools import islice

import numpy as np
import pytest
from scipy.stats import spearmanr

from cost_model.features import FEATURES, LOOP_FEATURES, Features, extract
from cost_model.gbt import RankingModel
from cost_model.model import Sample, sample
from mlc.graph.task import Task
from mlc.target import resolve
from mlc.testing.cuda_cases import CASES, product_case
from mlc.tuning.candidate import Candidate, TaskSpace
from mlc.tuning.untimed import inspect
from schedules.machine import gpu_machine

SPACES = {"cuda.mma": "cuda:sm_80", "cuda.wgmma": "cuda:sm_90a"}
described = pytest.mark.parametrize("name", SPACES)


def space_of(name: str, size: int = 2048) -> TaskSpace:
    func = product_case("product", (size, size), (size, size), "float16", "float32", transposed=True).func()
    found = TaskSpace(Task("product", func, resolve(SPACES[name])))
    assert found.space.name == name
    return found


def near(space: TaskSpace, count: int) -> list[Candidate]:
    """Candidates around the best seed, each with its price."""
    rng, first = random.Random(0), next(space.seeds())
    points = [first]
    while len(points) < 40 * count:
        points.append(space.neighbour(rng.choice(points[:count]), rng))
    found = [c for c in map(space.realise, dict.fromkeys(points)) if c is not None and space.features_of(c) is not None]
    assert len(found) >= count
    return found[:count]


def vector(space: TaskSpace, candidate: Candidate) -> np.ndarray:
    assert candidate.module is not None
    return extract(candidate.module, space.target, of_space=space.features_of(candidate)).vector


@described
def test_each_decision_is_seen(name: str) -> None:
    space = space_of(name)
    first = next(c for c in map(space.realise, space.seeds()) if c is not None)
    own, seen = vector(space, first), set()
    for place, knob in enumerate(space.knobs):
        for value in knob.values:
            other = space.realise((*first.point[:place], value, *first.point[place + 1:]))
            if value != first.point[place] and other is not None and space.features_of(other) is not None:
                assert (vector(space, other) != own).any(), f"{knob.name} {value}"
                seen.add(knob.name)
    assert {"stages", *({"cluster"} if name == "cuda.wgmma" else {"panel"})} <= seen


#: cases and what multiplies in them
FOOTPRINTS = {"dense_even": False, "conv3x3_odd": False, "mma_bf16": True, "mma_tf32_odd": True, "wgmma_f16_gelu": True,
              "attention_f32_odd": False, "attention_f16_odd": True, "attention_wgmma_f16_odd": True}
of_cases = pytest.mark.parametrize("case", FOOTPRINTS)


def case_space(case: str) -> TaskSpace:
    func = next(each for each in CASES if each.name == case).func()
    return TaskSpace(Task(case, func, resolve("cuda:sm_90a")))


@of_cases
def test_prices_go_by_the_footprint(case: str) -> None:
    """With as many blocks a multiprocessor as it says, a price is the same."""
    space = case_space(case)
    gpu = gpu_machine(space.target)
    for decisions in space.space.seeds(space.task.func, space.target):
        found = space.space.footprint(space.task.func, space.target, decisions)
        assert found is not None and found.tensor_cores == FOOTPRINTS[case]
        assert found.resident == max(1, gpu.resident(found.threads, found.registers, found.shared_bytes))
        prices = [space.space.price(space.task.func, space.target, decisions, n) for n in (0, found.resident)]
        assert prices[0] == prices[1] is not None, decisions
        assert 0 < found.occupancy <= 1 and found.under_way > 0
        assert found.stages == decisions.get("stages", 1) and found.cluster == decisions.get("cluster", 1)
        more = "stages" in decisions and decisions["stages"] > 2
        assert not more or found.under_way % (found.stages - 1) == 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@of_cases
def test_the_compiler_agrees_with_the_footprint(case: str) -> None:
    space = case_space(case)
    candidate = next(c for c in map(space.realise, space.seeds()) if c is not None)
    found = space.space.footprint(space.task.func, space.target, candidate.decisions)
    assert found is not None
    (kernel,) = inspect(candidate, space.target)
    assert kernel.threads == found.threads
    most = 1.01 if found.stages > 1 else 1.25  # without stages, rows across ``k`` are padded to more
    assert 0.9 <= kernel.shared_bytes / found.shared_bytes <= most
    assert 0.5 <= kernel.registers / found.registers <= 1.5


@described
def test_the_footprint_is_among_the_features(name: str) -> None:
    space = space_of(name)
    for candidate in islice(filter(None, map(space.realise, space.seeds())), 2):
        found = space.space.footprint(space.task.func, space.target, candidate.decisions)
        assert found is not None and candidate.module is not None
        own = dict(zip(FEATURES, vector(space, candidate), strict=True))
        for entry, value in asdict(found).items():
            assert own[f"space.{entry}"] == pytest.approx(math.log2(1 + value)), entry
        read = extract(candidate.module, space.target).vector
        np.testing.assert_array_equal(vector(space, candidate)[:len(LOOP_FEATURES)], read[:len(LOOP_FEATURES)])


@described
def test_what_bytes_under_way_gain_is_learned_across_sizes(name: str) -> None:
    """Decisions say it together alone, and on a smaller product other ones do."""
    def speeds(space: TaskSpace) -> tuple[list[Candidate], list[float]]:
        found = near(space, 24)
        asked = [space.features_of(c) for c in found]
        return found, [1e-3 / each.under_way for each in asked if each is not None]

    space, other = space_of(name), space_of(name, 512)
    candidates, seconds = speeds(space)
    model = RankingModel()
    model.fit([sample("product", c.module, space.target, s, (), space.features_of(c))
               for c, s in zip(candidates, seconds, strict=True) if c.module is not None])
    candidates, seconds = speeds(other)
    scores = model.score(other.task.func, other.target, [c.module for c in candidates if c.module is not None], (),
                         [other.features_of(c) for c in candidates])
    assert spearmanr(scores, seconds).statistic < -0.6


@described
def test_without_a_time_the_price_ranks(name: str) -> None:
    space = space_of(name)
    candidates = near(space, 12)
    of_space = [space.features_of(c) for c in candidates]
    modules = [c.module for c in candidates if c.module is not None]
    scores = RankingModel().score(space.task.func, space.target, modules, (), of_space)
    prices = [each.seconds for each in of_space if each is not None]
    assert spearmanr(scores, prices).statistic < -0.999
    assert max(scores) < math.log2(8), "of the time that arithmetic allows, not a thousandth"


def test_what_stages_gain_is_learned() -> None:
    """Of times that the price says nothing of."""
    space = space_of("cuda.mma")
    candidates = near(space, 24)
    stages = [c.decisions["stages"] for c in candidates]
    assert len(set(stages)) > 1
    seconds = [1e-3 / stage for stage in stages]
    model = RankingModel()
    model.fit([sample("product", c.module, space.target, s, (), space.features_of(c))
               for c, s in zip(candidates[:16], seconds, strict=False) if c.module is not None])
    scores = model.score(space.task.func, space.target, [c.module for c in candidates if c.module is not None], (),
                         [space.features_of(c) for c in candidates])
    assert spearmanr(scores, seconds).statistic < -0.6


def test_entries_of_which_nothing_is_said_change_no_tree() -> None:
    """Each tree draws a part of the columns: empty ones would be among them."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((24, len(LOOP_FEATURES))).astype("float32")
    padded = np.hstack([vectors, np.zeros((24, len(FEATURES) - len(LOOP_FEATURES)), "float32")])
    scores = []
    for rows in (vectors, padded):
        model = RankingModel()
        model.fit([Sample("task", Features(row, 1e-5), 1e-5 * (1 + row[0] ** 2)) for row in rows])
        scores.append(model.rank([Features(row, 1e-5) for row in rows]))
    np.testing.assert_array_equal(*scores)


def test_loops_say_everything_on_cpus() -> None:
    func = product_case("product", (64, 64), (64, 64), "float32", "float32").func()
    space = TaskSpace(Task("product", func, resolve("x86-64-v3")))
    candidate = next(c for c in map(space.realise, space.seeds()) if c is not None)
    assert space.features_of(candidate) is None
    assert not vector(space, candidate)[len(LOOP_FEATURES):].any() and len(vector(space, candidate)) == len(FEATURES)
