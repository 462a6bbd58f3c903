"""Points, candidates and their traces."""

from __future__ import annotations

import random

import pytest
import tvm
from tuning_tasks import TARGET, TiledMatmul, matmul

from mlc.log import Record
from mlc.tuning.candidate import TaskSpace
from schedules.space import InvalidDecision
from schedules.trace import replay, trace_json


@pytest.fixture(scope="module")
def space() -> TaskSpace:
    return TaskSpace(matmul(64, 64, 32), TiledMatmul())


def test_the_default_is_the_first_seed_that_can_be_scheduled(space: TaskSpace) -> None:
    assert [p[0] for p in space.seeds()] == [3, 1, 2]
    assert space.default is not None and space.default.decisions == {"rows": 1, "columns": 16, "unroll": 1}


def test_a_trace_replays_to_the_same_function(space: TaskSpace) -> None:
    candidate = space.realise((4, 32, 8))
    assert candidate is not None and candidate.schedule is not None
    again = replay(space.task.func, candidate.trace)
    tvm.ir.assert_structural_equal(again.mod, candidate.schedule.mod)
    assert trace_json(again) == candidate.trace


def test_a_trace_that_does_not_fit_is_refused_in_one_line(space: TaskSpace) -> None:
    candidate = space.realise((4, 32, 8))
    assert candidate is not None
    other = matmul(32, 32, 8)
    for func, trace in (
        (space.task.func, candidate.trace[:-9]), (space.task.func, "[[]]"), (other.func, "null"),
        (other.func, candidate.trace.replace('"C"', '"D"')),
    ):
        with pytest.raises(InvalidDecision, match="a trace must fit its function") as caught:
            replay(func, trace)
        assert "\n" not in str(caught.value)


def test_neighbours_stay_inside_and_move_one_to_three_knobs(space: TaskSpace) -> None:
    rng = random.Random(1)
    point, seen = (1, 4, 1), set()
    for _ in range(300):
        near = space.neighbour(point, rng)
        moved = sum(a != b for a, b in zip(point, near, strict=True))
        assert 1 <= moved <= 3
        assert all(v in knob.values for v, knob in zip(near, space.knobs, strict=True))
        seen.add(near)
        point = near
    assert len(seen) > 40


def test_most_steps_go_to_an_adjacent_value(space: TaskSpace) -> None:
    rng = random.Random(2)
    steps = []
    for _ in range(400):
        near = space.neighbour((4, 16, 2), rng)
        for a, b, knob in zip((4, 16, 2), near, space.knobs, strict=True):
            if a != b:
                steps.append(abs(knob.values.index(a) - knob.values.index(b)))
    assert sum(s == 1 for s in steps) > 0.6 * len(steps)


def test_a_space_that_breaks_costs_only_the_candidate() -> None:
    class Broken(TiledMatmul):
        def schedule(self, sch, target, pick):  # type: ignore[no-untyped-def]
            raise RuntimeError("a defect")

    space = TaskSpace(matmul(64, 64, 32), Broken())
    assert space.realise((4, 32, 8)) is None and space.default is None
    assert space.invalid["RuntimeError"] == 4


def test_records_of_another_space_or_of_other_knobs_are_not_recalled(space: TaskSpace) -> None:
    def record(name: str, decisions: dict[str, int]) -> Record:
        return Record(space.task.key, "t", name, decisions, "[]", times=(1.0,))

    good = {"rows": 4, "columns": 8, "unroll": 2}
    found = space.recall(record("test.tiled_matmul", good))
    assert found is not None and found.point == (4, 8, 2) and found.trace == "[]" and found.module is None
    assert space.recall(record("cpu.gemm", good)) is None
    assert space.recall(record("test.tiled_matmul", {**good, "rows": 5})) is None
    assert space.recall(record("test.tiled_matmul", {"rows": 4})) is None


def test_equal_functions_have_equal_code_and_others_do_not(space: TaskSpace) -> None:
    a, b, c = space.realise((4, 8, 2)), space.realise((4, 8, 2)), space.realise((4, 8, 4))
    assert a is not None and b is not None and c is not None
    assert a.code == b.code != c.code


def test_the_registered_space_is_found() -> None:
    space = TaskSpace(matmul(64, 64, 64))
    assert space.space.name == "cpu.gemm" and space.default is not None
    assert TARGET.threads == 2
