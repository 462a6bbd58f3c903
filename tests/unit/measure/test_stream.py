"""Candidates that are built while another runs: workers kept busy, one run at a time, and the misfortunes of each."""

from __future__ import annotations

import random
from collections.abc import Callable

import measure_tasks as tasks
import pytest
from tvm import tirx

from mlc.measure import (
    Dispatcher,
    Executor,
    LocalExecutor,
    LocalMeasurer,
    MeasureOptions,
    MeasureRequest,
    MeasureResult,
    local_measurer,
)
from mlc.measure.protocol import Message
from mlc.measure.stream import StreamingExecutor, StreamingMeasurer
from mlc.target import resolve
from mlc.testing.builders import simulated_workers
from mlc.testing.remote import Clock

OPTIONS = MeasureOptions(threads=2, timeout=5.0, min_repeat_seconds=0.002)
SECONDS = {"run": 0.1, "reference": 0.5, "prepare": 0.1, "interleave": 1.0}


def builds(kind: str, message: Message) -> float:
    """A build takes 1 to 8 s."""
    return SECONDS.get(kind) or random.Random(message["trace"]).uniform(1.0, 8.0)


def ran(message: Message) -> MeasureResult:
    return MeasureResult((1e-3,), code_hash=message["trace"])


def unbuilt(message: Message) -> MeasureResult:
    """Of one task no candidate can be built."""
    return MeasureResult(failure="build") if message["func"] == "func1" else ran(message)


def request(number: int, task: int = 0) -> MeasureRequest:
    return MeasureRequest(f"task{task}", f"func{task}", "target", f"trace{number}")


def rate(made: Callable[[], Executor], count: int, batch: int) -> tuple[float, bool]:
    """Results a second where another batch begins whenever the executor wants one, and whether two ran at once."""
    clock, told = Clock(), 0

    def hear(_index: int, result: MeasureResult) -> None:
        nonlocal told
        told += not result.failure

    with simulated_workers(clock, builds, ran) as pools, Dispatcher(made(), OPTIONS, grace=1e4, clock=clock) as by:
        begun = 0
        while told < count:
            while begun < count and (by.hungry or told == begun):
                by.begin([request(number, number % 5) for number in range(begun, begun + batch)], hear)
                begun += batch
            by.advance()
        return count / clock.now, pools[0].overlapped


@pytest.mark.parametrize(("workers", "gain"), [(8, 1.5), (16, 2.8)])
def test_no_worker_waits_for_the_slowest_of_a_batch(workers: int, gain: float) -> None:
    before, _ = rate(lambda: LocalExecutor(LocalMeasurer(OPTIONS, workers)), 160, 8)
    after, overlapped = rate(lambda: StreamingExecutor(StreamingMeasurer(OPTIONS, workers)), 160, 8)
    assert not overlapped and after > gain * before, (before, after)
    assert after > 0.8 * workers / (4.5 + SECONDS["run"]), "workers build nearly all of the time"


def test_equal_code_is_run_once() -> None:
    clock = Clock()
    with simulated_workers(clock, builds, lambda m: MeasureResult((1e-3,), code_hash="same")) as pools, Dispatcher(
            StreamingExecutor(StreamingMeasurer(OPTIONS, 4)), OPTIONS, clock=clock) as by:
        results = by.measure([request(number) for number in range(12)])
        assert {r.times for r in results} == {(1e-3,)} and pools[0].running == pytest.approx(SECONDS["run"])


def test_no_reference_is_computed_beside_a_candidate_that_is_timed() -> None:
    """Tasks come one after another."""
    clock = Clock()
    with simulated_workers(clock, builds, ran) as pools, Dispatcher(
            StreamingExecutor(StreamingMeasurer(OPTIONS, 4)), OPTIONS, grace=1e4, clock=clock) as by:
        results = by.measure([request(number, number // 8) for number in range(64)])
        assert all(not r.failure for r in results) and not pools[0].overlapped
        assert pools[0].running == pytest.approx(64 * SECONDS["run"]) and clock.now < 64 * 4.6 / 4 * 1.25


def test_a_comparison_comes_after_a_reference_that_nobody_needs_any_more() -> None:
    clock = Clock()

    def slow(kind: str, message: Message) -> float:
        return 50.0 if kind == "reference" else builds(kind, message)

    with simulated_workers(clock, slow, unbuilt), Dispatcher(
            StreamingExecutor(StreamingMeasurer(OPTIONS, 2)), OPTIONS, grace=1e4, clock=clock) as by:
        (failed,) = by.measure([request(0, task=1)])
        assert failed.failure == "build" and clock.now < 50.0
        assert [len(r.times) for r in by.compare([request(1), request(2)], rounds=3)] == [3, 3]


def test_comparisons_are_built_beside_each_other_and_timed_one_by_one() -> None:
    clock = Clock()
    with simulated_workers(clock, builds, ran) as pools, Dispatcher(
            StreamingExecutor(StreamingMeasurer(OPTIONS, 8)), OPTIONS, grace=1e4, clock=clock) as by:
        batches = [by.begin_comparison([request(4 * n + i, n) for i in range(4)], rounds=3) for n in range(16)]
        while not all(batch.done for batch in batches):
            by.advance()
        assert all([len(r.times) for r in batch.results] == [3] * 4 for batch in batches)
        timing = 16 * (4 * SECONDS["run"] + SECONDS["interleave"])
        assert not pools[0].overlapped and pools[0].running == pytest.approx(timing)
        assert clock.now < 16 * 4 * 4.5 / 8 * 1.5, "eight workers build at once"


def test_comparisons_that_an_interrupt_abandons_are_not_made_later() -> None:
    clock, made = Clock(), 0

    def interrupted(kind: str, message: Message) -> float:
        nonlocal made
        made += kind == "interleave"
        if made == 1 and kind == "interleave":
            raise KeyboardInterrupt
        return builds(kind, message)

    with simulated_workers(clock, interrupted, ran), Dispatcher(
            StreamingExecutor(StreamingMeasurer(OPTIONS, 2)), OPTIONS, grace=1e4, clock=clock) as by:
        for _ in range(2):
            by.begin_comparison([request(0), request(1)], rounds=3)
        with pytest.raises(KeyboardInterrupt):
            while True:
                by.advance()
        assert by.compare([request(2), request(3)], rounds=3) and made == 2


def test_only_what_is_for_a_gpu_streams() -> None:
    for target, kind in (("cuda:sm_90a", StreamingExecutor), ("native", LocalExecutor)):
        with simulated_workers(Clock(), builds, ran):
            assert isinstance(local_measurer(resolve(target)).executor, kind)  # type: ignore[attr-defined]


@pytest.mark.alone
def test_real_workers_survive_what_candidates_do() -> None:
    """Each good candidate is timed, each bad one fails by itself, and a comparison follows."""
    good: list[tirx.PrimFunc] = [tasks.good, tasks.unrolled]
    bad = {tasks.segfault: "crash", tasks.tripled: "wrong", tasks.hang: "timeout"}
    requests = [tasks.request(tasks.doubled(), scheduled=f) for f in (good[0], *bad, good[1])]
    func = tasks.gemm()
    requests += [tasks.request(func, trace) for trace in tasks.traces(func, 4)]
    with Dispatcher(StreamingExecutor(StreamingMeasurer(OPTIONS, 2)), OPTIONS) as by:
        results = by.measure(requests)
        assert [r.failure for r in results] == ["", *bad.values(), *[""] * 5], results
        assert all(r.times and r.build_seconds > 0 and r.code_hash for r in results if not r.failure)
        compared = by.compare([requests[0], requests[1], requests[4]], rounds=3)  # one takes its worker along
        assert [(len(r.times), r.failure) for r in compared] == [(3, ""), (0, "crash"), (3, "")]


@pytest.mark.alone
def test_after_an_interrupt_it_goes_on() -> None:
    func = tasks.gemm(16, 64, 24)
    requests = [tasks.request(func, trace) for trace in tasks.traces(func, 4)]

    def interrupted(_index: int, _result: MeasureResult) -> None:
        raise KeyboardInterrupt

    with Dispatcher(StreamingExecutor(StreamingMeasurer(OPTIONS, 2)), OPTIONS) as by:
        with pytest.raises(KeyboardInterrupt):
            by.measure(requests, interrupted)
        assert all(not r.failure for r in by.measure(requests))
