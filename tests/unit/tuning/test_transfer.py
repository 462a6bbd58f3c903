"""Decisions that were good for other tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tuning_tasks import TARGET, TiledMatmul, matmul

from mlc.log import Record, TuningLog
from mlc.tuning.candidate import TaskSpace
from mlc.tuning.transfer import Experience


def record(name: str, decisions: dict[str, int], flops: float, **fields: object) -> Record:
    key = f"{abs(hash(name)):016x}-{TARGET.canonical}-tvm"
    made = Record(key, name, TiledMatmul.name, decisions, "[]", (1e-5,), flops=flops)
    return replace(made, **fields)


def decisions(rows: int, columns: int, unroll: int) -> dict[str, int]:
    return {"rows": rows, "columns": columns, "unroll": unroll}


@pytest.fixture
def space() -> TaskSpace:
    return TaskSpace(matmul(64, 64, 32), TiledMatmul())


FLOPS = 2.0 * 64 * 64 * 32


def test_the_nearest_task_comes_first(space: TaskSpace) -> None:
    experience = Experience([
        record("far", decisions(8, 8, 8), 64 * FLOPS), record("near", decisions(4, 32, 2), 2 * FLOPS),
        record(space.task.name, decisions(2, 64, 1), 2 * FLOPS),
    ])
    assert list(experience.points(space, FLOPS)) == [(2, 64, 1), (4, 32, 2), (8, 8, 8)]


def test_decisions_are_rounded_to_what_the_task_has_and_count_as_farther(space: TaskSpace) -> None:
    experience = Experience([
        record("rounded", decisions(12, 128, 6), FLOPS), record("exact", decisions(8, 16, 2), FLOPS),
    ])
    assert list(experience.points(space, FLOPS)) == [(8, 16, 2), (16, 64, 8)]


def test_what_says_nothing_is_left_out(space: TaskSpace) -> None:
    good = decisions(4, 32, 2)
    experience = Experience([
        record("failed", good, FLOPS, times=(), failure="crash"), record("other", good, FLOPS, space="cpu.conv2d"),
        record("older", {"rows": 4, "columns": 32}, FLOPS), record("own", good, FLOPS, task_key=space.task.key),
    ])
    assert list(experience.points(space, FLOPS)) == []


def test_equal_points_are_given_once(space: TaskSpace) -> None:
    experience = Experience([record(name, decisions(4, 32, 2), FLOPS) for name in "abc"])
    assert list(experience.points(space, FLOPS)) == [(4, 32, 2)]


def test_a_search_takes_seeds_and_hints_in_turn_and_keeps_the_default(space: TaskSpace) -> None:
    before = space.default
    space.hints = ((4, 32, 2), (1, 16, 1))
    assert space.starts() == [(3, 16, 1), (4, 32, 2), (1, 16, 1), (2, 16, 1)]
    assert before is not None and space.default is not None and space.default.point == before.point == (1, 16, 1)


def test_a_log_gives_the_best_of_each_task_of_the_target(tmp_path: Path, space: TaskSpace) -> None:
    with TuningLog(tmp_path / "log.db") as log:
        best = record("a", decisions(4, 32, 2), FLOPS)
        elsewhere = record("b", decisions(1, 4, 1), FLOPS, task_key="0-llvm/x86-64-v3/2-tvm")
        log.append([best, replace(best, decisions=decisions(1, 8, 1), times=(2e-5,)), elsewhere])
        assert list(Experience.of([log], TARGET).points(space, FLOPS)) == [(4, 32, 2)]
