"""The measurer's promises: right results in order, equal code timed once, nothing left behind."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure_tasks as tasks
import psutil
import pytest
from tvm import te, tirx

from mlc.graph.task import normalise
from mlc.measure import LocalMeasurer, MeasureOptions
from mlc.measure.pool import Job

pytestmark = pytest.mark.alone

OPTIONS = MeasureOptions(threads=2, timeout=5.0, min_repeat_seconds=0.002)


@pytest.fixture(scope="module")
def measurer() -> Iterator[LocalMeasurer]:
    with LocalMeasurer(OPTIONS, workers=2) as made:
        yield made


def _pids(measurer: LocalMeasurer) -> list[int]:
    return [worker.pid for worker in measurer._pool._slots if worker is not None]


def test_candidates_of_a_space_pass_the_check_and_are_timed(measurer: LocalMeasurer) -> None:
    func = tasks.gemm()
    heard: list[int] = []
    results = measurer.measure([tasks.request(func, t) for t in tasks.traces(func, 8)], lambda i, _: heard.append(i))
    assert all(not r.failure and len(r.times) == OPTIONS.repeats for r in results), results
    assert all(0 < t < 0.1 for r in results for t in r.times)
    assert all(r.build_seconds > 0 and r.code_hash for r in results)
    assert sorted(heard) == list(range(8))


def test_equal_code_is_timed_once(measurer: LocalMeasurer) -> None:
    func = tasks.gemm(32, 32, 32)
    first, second = tasks.traces(func, 2)
    measured = measurer.measure([tasks.request(func, t) for t in (first, second, first)])
    again = measurer.measure([tasks.request(func, t) for t in (second, first)])
    assert measured[0].times == measured[2].times == again[1].times and measured[1].times == again[0].times
    spared, ran = sorted((measured[0].run_seconds, measured[2].run_seconds))
    assert spared == again[0].run_seconds == again[1].run_seconds == 0 < ran
    assert measured[0].code_hash == measured[2].code_hash != measured[1].code_hash


def test_a_time_is_what_the_call_takes(measurer: LocalMeasurer) -> None:
    (result,) = measurer.measure([tasks.request(tasks.doubled(), scheduled=tasks.slow)])
    assert all(0.003 < t < 0.02 for t in result.times)


def test_a_comparison_times_in_turn_and_afresh(measurer: LocalMeasurer) -> None:
    requests = [tasks.request(tasks.doubled(), scheduled=f) for f in (tasks.slow, tasks.good)]
    measurer.measure(requests)
    slow, fast = measurer.compare(requests, rounds=7)
    assert len(slow.times) == len(fast.times) == 7 and len(set(slow.times)) > 1
    assert min(slow.times) > max(fast.times)


def test_candidates_of_several_tasks_are_checked_and_timed_in_turn(measurer: LocalMeasurer) -> None:
    func = tasks.gemm(48, 64, 40)
    requests = [
        tasks.request(tasks.doubled(), scheduled=tasks.slow), tasks.request(func, tasks.traces(func, 1)[0]),
        tasks.request(tasks.doubled(), scheduled=tasks.tripled), tasks.request(tasks.doubled(), scheduled=tasks.good),
    ]
    slow, product, wrong, good = measurer.compare(requests, rounds=5)
    assert [len(r.times) for r in (slow, product, good)] == [5, 5, 5] and wrong.failure == "wrong"
    assert min(slow.times) > max(*product.times, *good.times)


def test_a_candidate_far_behind_the_best_so_far_is_timed_once() -> None:
    wanted = [replace(tasks.request(tasks.doubled(), scheduled=f), best=1e-4) for f in (tasks.slow, tasks.good)]
    with LocalMeasurer(OPTIONS, workers=1) as measurer:
        behind, ahead = measurer.measure(wanted)
    assert len(behind.times) == 1 and behind.times[0] > 2e-3 and not behind.failure
    assert len(ahead.times) >= 3


def test_times_are_relative_to_the_baselines(measurer: LocalMeasurer) -> None:
    func = tasks.gemm(96, 64, 96)
    first, *others = tasks.traces(func, 4)
    wanted = [replace(tasks.request(func, trace), baseline=first) for trace in (*others, first)]
    *_, usual = measurer.measure(wanted)
    assert len(usual.times) == OPTIONS.most_repeats, "all others are measured by it"
    seconds = statistics.median(usual.times)
    with LocalMeasurer(OPTIONS, workers=2) as made:
        # said to take ten times as long, it makes all others take as much longer, in either worker
        scaled = made.measure([replace(request, baseline_seconds=10 * seconds) for request in wanted])
    assert all(not r.failure and r.slowness == 1.0 for r in scaled), scaled
    assert statistics.median(scaled[-1].times) > 4 * seconds, (seconds, scaled)


def test_who_has_no_baseline_is_timed_without_one() -> None:
    func = tasks.gemm(96, 64, 80)
    wanted = [replace(tasks.request(func, trace), baseline="[]", baseline_seconds=0.2)
              for trace in tasks.traces(func, 2)]
    with LocalMeasurer(OPTIONS, workers=1) as made:
        results = made.measure(wanted)
    assert all(not r.failure and max(r.times) < 0.1 for r in results), results


def test_a_baseline_that_takes_its_worker_along_is_built_no_more() -> None:
    held: list[object] = []

    class Hurried(LocalMeasurer):
        def _hold_job(self, *given: Any) -> Job:
            held.append(given)
            assert len(held) <= 2, "once a worker"
            return replace(super()._hold_job(*given), limit=0.0)

    func = tasks.gemm(96, 64, 72)
    first, *others = tasks.traces(func, 4)
    wanted = [replace(tasks.request(func, trace), baseline=first, baseline_seconds=1e-3) for trace in others]
    with Hurried(OPTIONS, workers=2) as made:
        results = made.measure(wanted)
    assert held and all(not r.failure for r in results), results


def test_a_slow_candidate_is_cut_off() -> None:
    with LocalMeasurer(replace(OPTIONS, cutoff=0.001), workers=1) as measurer:
        slow, fast = measurer.measure([tasks.request(tasks.doubled(), scheduled=f) for f in (tasks.slow, tasks.good)])
    assert len(slow.times) == 1 and len(fast.times) == 3


def _several_outputs() -> tirx.PrimFunc:
    a = te.placeholder((64, 32), name="a")
    index = te.placeholder((64,), name="index", dtype="int64")
    picked = te.compute((64, 32), lambda i, j: a[index[i], j] * 2, name="picked")
    flags = te.compute((64,), lambda i: index[i] > 3, name="flags")
    return normalise(te.create_prim_func([a, index, picked, flags]))


@pytest.mark.parametrize("func", [
    _several_outputs(), tasks.elementwise(lambda x: tirx.log(x) / tirx.sqrt(x)),
    tasks.elementwise(lambda x: x * tirx.const(1.5, "float16"), "float16"),
    tasks.elementwise(lambda x: x * tirx.const(3, "int8"), "int8"),
    tasks.elementwise(lambda x: x + tirx.const(1, "bfloat16"), "bfloat16"),
    tasks.elementwise(lambda x: tirx.Select(x > 0, x, tirx.const(-3.0e38, "float32"))),
], ids=["index", "log", "float16", "int8", "bfloat16", "mask"])  # fmt: skip
def test_all_kinds_of_data_are_checked(measurer: LocalMeasurer, func: tirx.PrimFunc) -> None:
    (trace,) = tasks.traces(func, 1)
    scheduled, plain = measurer.measure([tasks.request(func, trace), tasks.request(func)])
    assert not scheduled.failure and not plain.failure, (scheduled, plain)


def test_what_a_candidate_prints_is_not_taken_for_an_answer(measurer: LocalMeasurer) -> None:
    (result,) = measurer.measure([tasks.request(tasks.doubled(), scheduled=tasks.chatter)])
    assert not result.failure


def test_an_innocent_candidate_survives_what_an_earlier_one_did() -> None:
    with LocalMeasurer(OPTIONS, workers=1) as measurer:
        order = (tasks.spoils_input, tasks.unrolled, tasks.leaves_trap, tasks.steps_into_trap)
        results = measurer.measure([tasks.request(tasks.doubled(), scheduled=f) for f in order])
    assert [r.failure for r in results] == ["", "", "", ""], results


def test_a_worker_killed_from_outside_is_replaced(measurer: LocalMeasurer) -> None:
    request = tasks.request(tasks.gemm(), "")
    assert not measurer.measure([request])[0].failure
    before = _pids(measurer)
    psutil.Process(before[0]).kill()
    while psutil.Process(before[0]).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    fresh = tasks.traces(tasks.gemm(64, 64, 64), 4)
    results = measurer.measure([tasks.request(tasks.gemm(64, 64, 64), t) for t in fresh])
    assert all(not r.failure for r in results), results
    assert before[0] not in _pids(measurer) and before[1] in _pids(measurer)


def test_an_exception_in_the_listener_leaves_the_measurer_usable(measurer: LocalMeasurer) -> None:
    func = tasks.gemm(16, 64, 24)
    requests = [tasks.request(func, t) for t in tasks.traces(func, 4)]

    def listener(index: int, result: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measurer.measure(requests, listener)
    assert all(not r.failure for r in measurer.measure(requests))


def test_starting_is_quick_and_closing_leaves_nothing() -> None:
    start = time.monotonic()
    measurer = LocalMeasurer(OPTIONS, workers=2)
    assert time.monotonic() - start < 0.5, "workers start in the background"
    (result,) = measurer.measure([tasks.request(tasks.doubled(), scheduled=tasks.good)])
    assert not result.failure and time.monotonic() - start < 15
    pids, folder = _pids(measurer), measurer._folder
    assert folder.is_dir() and all(psutil.pid_exists(pid) for pid in pids)
    measurer.close()
    assert not folder.exists() and not any(psutil.pid_exists(pid) for pid in pids)


PARENT = """
import sys
sys.modules["torch"] = None  # TVM would import it, for nothing
import measure_tasks as tasks
from mlc.measure import LocalMeasurer, MeasureOptions
with LocalMeasurer(MeasureOptions(threads=1, timeout=2.0), workers=2) as measurer:
    measurer.measure([tasks.request(tasks.doubled(), scheduled=tasks.good)])
    print(*[worker.pid for worker in measurer._pool._slots], flush=True)
    measurer.measure([tasks.request(tasks.doubled(), scheduled=tasks.hang)])
"""


def _parent_and_workers(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "TMPDIR": str(folder)},
    )
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.5)  # the hanging candidate is running now
    return parent, workers


def test_an_interrupt_ends_parent_and_workers_with_one_trace(tmp_path: Path) -> None:
    parent, workers = _parent_and_workers(tmp_path)
    os.killpg(parent.pid, signal.SIGINT)  # what Ctrl-C does
    _, errors = parent.communicate(timeout=20)
    assert errors.count("Traceback") == 1 and errors.strip().endswith("KeyboardInterrupt")
    assert not psutil.wait_procs(workers, timeout=5)[1]


def test_workers_end_when_their_parent_is_killed_even_in_a_hanging_candidate(tmp_path: Path) -> None:
    parent, workers = _parent_and_workers(tmp_path)
    parent.kill()
    parent.communicate()
    assert not psutil.wait_procs(workers, timeout=2.0 + 2.0 + 4)[1], "the limit of the job, and its grace"


def test_nobody_is_timed_while_the_last_ones_threads_still_spin(measurer: LocalMeasurer, monkeypatch) -> None:
    """Candidates of one worker run one after another, and the other worker is waited for when they change."""
    func = tasks.gemm(16, 64, 48)
    ran: list[int] = []
    rested: list[int] = []
    prepare = LocalMeasurer._run_job

    def run_job(self, batch, candidate):
        ran.append(candidate.worker.pid)
        return prepare(self, batch, candidate)

    monkeypatch.setattr(LocalMeasurer, "_run_job", run_job)
    monkeypatch.setattr("mlc.measure.local.wait_until_quiescent", rested.append)
    results = measurer.measure([tasks.request(func, t) for t in tasks.traces(func, 8)])
    assert all(not r.failure for r in results)
    changes = [a for a, b in pairwise(ran) if a != b]
    assert len(changes) == len(set(ran)) - 1 and [pid for pid in rested if pid in ran][-len(changes):] == changes


def test_what_was_promising_is_not_built_again_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlc.measure import compiling_runner

    built: list[object] = []
    build = compiling_runner._build
    monkeypatch.setattr(compiling_runner, "_build", lambda func, target: built.append(func) or build(func, target))
    monkeypatch.setattr("mlc.threads.configure", lambda count: None)  # this process has its own
    func = tasks.gemm(32, 64, 24)
    requests = [tasks.request(func, trace) for trace in tasks.traces(func, 3)]
    with LocalMeasurer(OPTIONS, workers=1) as made:  # its messages are what a worker gets
        batches = [made._batch(requests, OPTIONS) for _ in range(2)]
        jobs = [[made._build_job(batch, c).message for c in batch.candidates] for batch in batches]
        runs = [made._run_message(batches[0], c) for c in batches[0].candidates]
        bench = compiling_runner.CompilingRunner(1)
        reference = made._reference_job(requests[0], batches[0].candidates[0].reference).message
        bench.reference(reference)
        first = [bench.build(job) for job in jobs[0]]
        assert len(built) == 4
        for number, run in enumerate(runs):
            bench.run(run | ({"best": 1e-12} if number else {}))
        again = [bench.build(job) for job in jobs[1]]
    assert len(built) == 4 + 2, "the first of a task is kept, those that are far from the best are not"
    assert [a["code_hash"] for a in again] == [f["code_hash"] for f in first]


def test_rivals_are_compared_where_most_of_them_were_built(monkeypatch: pytest.MonkeyPatch) -> None:
    func = tasks.gemm(32, 96, 24)
    requests = [tasks.request(func, trace) for trace in tasks.traces(func, 6)]
    ran: dict[int, list[int]] = {}
    compared: list[int] = []
    run_job, interleave = LocalMeasurer._run_job, LocalMeasurer._interleave

    def noted(self, batch, candidate):
        ran.setdefault(self._pool.slot_of(candidate.worker), []).append(candidate.index)
        return run_job(self, batch, candidate)

    def chosen(self, batch, candidates, rounds, slot):
        compared.append(slot)
        return interleave(self, batch, candidates, rounds, slot)

    with LocalMeasurer(OPTIONS, workers=2) as made:
        with monkeypatch.context() as patch:
            patch.setattr(LocalMeasurer, "_run_job", noted)
            made.measure(requests)
        monkeypatch.setattr(LocalMeasurer, "_interleave", chosen)
        for slot, indices in ran.items():
            results = made.compare([requests[i] for i in indices], rounds=2)
            assert compared.pop() == slot and all(len(r.times) == 2 for r in results)
