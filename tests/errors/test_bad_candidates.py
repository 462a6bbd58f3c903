"""Candidates that crash, hang, compute something else or are no candidates: each is a record, none ends a run."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tvm import tirx
from tvm.script import from_source

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "measure"))
import measure_tasks as tasks

from mlc import subprocesses
from mlc.errors import MeasureError
from mlc.measure import LocalMeasurer, MeasureOptions, MeasureRequest

TASK = tasks.doubled()
TIMEOUT = 2.0


@pytest.fixture(scope="module")
def measurer() -> Iterator[LocalMeasurer]:
    with LocalMeasurer(MeasureOptions(threads=2, timeout=TIMEOUT, min_repeat_seconds=0.002), workers=2) as made:
        made.measure([tasks.request(TASK, scheduled=tasks.good)])
        yield made


@pytest.mark.parametrize(("candidate", "failure", "detail"), [
    (tasks.segfault, "crash", "SIGSEGV"), (tasks.abort, "crash", "SIGABRT"), (tasks.leave, "crash", "exit code 3"),
    (tasks.far_write, "crash", "SIGSEGV"), (tasks.hang, "timeout", "no answer after"),
    (tasks.half_written, "wrong", "2048 of 4096 elements differ from the reference, the first at [2048]: nan"),
    (tasks.tripled, "wrong", "of 4096 elements differ from the reference, the first at [0]"),
    (tasks.one_nan, "wrong", "1 of 4096 elements differ"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_it_fails_alone_and_says_why(
    measurer: LocalMeasurer, candidate: tirx.PrimFunc, failure: str, detail: str
) -> None:
    batch = [tasks.request(TASK, scheduled=f) for f in (tasks.good, candidate, tasks.unrolled, candidate)]
    heard = []
    results = measurer.measure(batch, lambda i, result: heard.append((i, result)))
    assert [r.failure for r in results] == ["", failure, "", failure]
    assert detail in results[1].detail and not results[1].times and "\n" not in results[1].detail
    assert len(results[0].times) == len(results[2].times) == 3
    assert sorted(heard, key=lambda pair: pair[0]) == list(enumerate(results)), "each is told once, as it is returned"


@pytest.mark.parametrize("trace", [
    "[1, 2", "17", '{"a": []}', "[[], [], []]", '[[["Nonsense", [], [], []]], []]', "[" * 5000,
    '[[["GetSBlock", [], ["nowhere", "main"], ["b0"]]], []]', '[[["GetSBlock", [], ["out", "main"], ["b0"]], '
    '["GetLoops", ["b0"], [], ["l1", "l2"]]], []]',
])  # fmt: skip
def test_a_trace_that_is_none_or_does_not_fit_is_a_build_failure(measurer: LocalMeasurer, trace: str) -> None:
    before = [worker.pid for worker in measurer._pool._slots if worker is not None]
    (result,) = measurer.measure([tasks.request(TASK, trace)])
    assert result.failure == "build" and "a trace must " in result.detail
    assert [worker.pid for worker in measurer._pool._slots if worker is not None] == before


def test_the_trace_of_another_task_is_a_build_failure(measurer: LocalMeasurer) -> None:
    (trace,) = tasks.traces(tasks.gemm(), 1)
    (result,) = measurer.measure([tasks.request(TASK, trace)])
    assert result.failure == "build"


@pytest.mark.parametrize("text", ["", "{}", "no json", '{"root_index": 1, "nodes": []}'])
def test_a_function_that_cannot_be_read_is_a_failure(measurer: LocalMeasurer, text: str) -> None:
    broken = MeasureRequest("key", text, tasks.TARGET.attrs, "", "")
    good, bad = measurer.measure([tasks.request(TASK, scheduled=tasks.good), broken])
    assert not good.failure and bad.failure in ("run", "build") and "\n" not in bad.detail


def test_a_task_whose_reference_has_nan_is_never_timed(measurer: LocalMeasurer) -> None:
    nan = tasks.elementwise(lambda x: tirx.log(x - tirx.const(50.0, "float32")))
    (result,) = measurer.measure([tasks.request(nan)])
    assert result.failure == "run" and "reference output could not be computed" in result.detail
    assert "NaN" in result.detail and not result.times


def test_a_crashing_reference_fails_its_own_task_only(measurer: LocalMeasurer) -> None:
    crashing = tasks.normalise(tasks.segfault)
    bad, good = measurer.measure([tasks.request(crashing), tasks.request(TASK, scheduled=tasks.good)])
    assert bad.failure and "SIGSEGV" in bad.detail
    assert not good.failure


def test_a_failure_takes_no_part_in_a_comparison(measurer: LocalMeasurer) -> None:
    wanted = (tasks.good, tasks.segfault, tasks.tripled, tasks.unrolled)
    results = measurer.compare([tasks.request(TASK, scheduled=f) for f in wanted], rounds=5)
    assert [r.failure for r in results] == ["", "crash", "wrong", ""]
    assert [len(r.times) for r in results] == [5, 0, 0, 5]


_BODIES = {
    "": "for i in range({k}):\n        out[i] = a[i] * T.float32(2)\n"
        "    for i in range({k}, 4096):\n        out[i] = a[i] + a[i]",
    "crash": 'T.evaluate(T.call_extern("int32", "raise", 11))\n    out[{k}] = a[{k}]',
    "timeout": 'while T.call_extern("int32", "usleep", 1000) == 0:\n        out[{k}] = a[{k}]',
    "wrong": "for i in range(4096):\n        out[i] = a[i] * T.if_then_else(i == {k}, T.float32(3), T.float32(2))",
}  # fmt: skip


def _generated(kind: str, k: int) -> tirx.PrimFunc:
    """A candidate of its own code that ends as ``kind`` says."""
    return from_source(
        "# from tvm.script import tirx as T\n@T.prim_func(s_tir=True)\n"
        'def main(a: T.Buffer((4096,), "float32"), out: T.Buffer((4096,), "float32")):\n'
        f"    {_BODIES[kind].format(k=k)}\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_candidates_of_which_a_tenth_misbehave() -> None:
    """Each one's result is its own: no good one suffers from its neighbours, no bad one is accepted."""
    kinds = ["crash", "timeout", "wrong"] * 34
    wanted = kinds[:100] + [""] * 900
    random.Random(5).shuffle(wanted)
    options = MeasureOptions(threads=1, timeout=3.0, min_repeat_seconds=0.001)
    with LocalMeasurer(options, workers=2) as made:
        for start in range(0, len(wanted), 50):
            batch = [tasks.request(TASK, scheduled=_generated(kind, start + i + 1))
                     for i, kind in enumerate(wanted[start : start + 50])]
            results = made.measure(batch)
            assert [r.failure for r in results] == wanted[start : start + 50]
            assert all(bool(r.times) is not bool(r.failure) for r in results)
            assert len({r.code_hash for r in results if r.code_hash}) == sum(bool(r.code_hash) for r in results)


def test_workers_that_cannot_start_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses.sys, "executable", "/bin/false")
    with LocalMeasurer(MeasureOptions(threads=1), workers=1) as broken:
        with pytest.raises(MeasureError, match=r"workers must be able to start.*exit code 1.*mlc doctor") as caught:
            broken.measure([tasks.request(TASK)])
        assert "\n" not in str(caught.value)


def test_a_closed_measurer_says_so() -> None:
    closed = LocalMeasurer(MeasureOptions(threads=1), workers=1)
    closed.close()
    closed.close()
    with pytest.raises(MeasureError, match="after it was closed"):
        closed.measure([tasks.request(TASK)])
    with pytest.raises(MeasureError, match="at least one worker"):
        LocalMeasurer(MeasureOptions(threads=1), workers=0)
