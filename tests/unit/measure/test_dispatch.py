"""Whatever an executor does to its jobs, a batch of candidates becomes one result each, in order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from mlc.errors import MeasureError
from mlc.measure.dispatch import Dispatcher
from mlc.measure.executor import Answer, Executor, Job
from mlc.measure.local_executor import LocalExecutor
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult
from mlc.testing.remote import Clock, Misfortune, RemoteExecutor

OPTIONS = MeasureOptions(threads=1)
SEEDS = range(200)


def _requests(count: int, task: str = "task") -> list[MeasureRequest]:
    return [MeasureRequest(task, "func", "target", str(number)) for number in range(count)]


def _result(request: MeasureRequest, rounds: int) -> MeasureResult:
    """A result that names its request, so that no mix-up goes unnoticed; every seventh candidate fails."""
    number = int(request.trace)
    if number % 7 == 6:
        return MeasureResult(failure="crash", detail=request.trace)
    return MeasureResult((1.0 + number,) * max(1, rounds), detail=request.trace)


def _run(job: Job) -> Sequence[MeasureResult]:
    return [_result(request, job.rounds) for request in job.requests]


class _Quiet:
    """A local measurer that times nothing."""

    closed = 0

    def measure(self, requests, on_result=None):  # type: ignore[no-untyped-def]
        results = [_result(request, 0) for request in requests]
        for index in random.Random(len(results)).sample(range(len(results)), len(results)):
            if on_result is not None:
                on_result(index, results[index])
        return results

    def compare(self, requests, rounds):  # type: ignore[no-untyped-def]
        return [_result(request, rounds) for request in requests]

    def close(self) -> None:
        self.closed += 1


class ExecutorContract:
    """What every executor must do, checked through the dispatcher that everybody uses it by."""

    def executor(self, clock: Clock) -> Executor:
        raise NotImplementedError

    @pytest.fixture
    def dispatcher(self) -> Dispatcher:
        clock = Clock()
        return Dispatcher(self.executor(clock), OPTIONS, clock=clock)

    @pytest.mark.parametrize("count", [0, 1, 5, 200])
    def test_one_result_for_each_request_in_order(self, dispatcher: Dispatcher, count: int) -> None:
        told: dict[int, MeasureResult] = {}
        requests = _requests(count)
        results = dispatcher.measure(requests, told.__setitem__)
        assert results == [_result(r, 0) for r in requests] and told == dict(enumerate(results))

    def test_a_comparison_is_one_job(self, dispatcher: Dispatcher) -> None:
        requests = _requests(5)
        assert dispatcher.compare(requests, 9) == [_result(r, 9) for r in requests]
        assert dispatcher.compare([], 9) == []

    def test_batch_after_batch(self, dispatcher: Dispatcher) -> None:
        for count in (3, 17, 1):
            assert len(dispatcher.measure(_requests(count))) == count

    def test_polling_without_patience_begins_nothing(self) -> None:
        executor = self.executor(Clock())
        assert executor.poll(0.0) == []

    def test_a_job_may_be_submitted_again(self) -> None:
        executor = self.executor(Clock())
        job = Job("1", tuple(_requests(1)), OPTIONS)
        executor.submit([job])
        executor.submit([job])
        answers: list[Answer] = []
        for _ in range(4):
            answers += executor.poll(10.0)
        assert {a.id for a in answers} == {"1"} and all(a.results == tuple(_run(job)) for a in answers)

    def test_closing_twice_and_then_no_more(self, dispatcher: Dispatcher) -> None:
        with dispatcher:
            dispatcher.measure(_requests(1))
        dispatcher.close()
        with pytest.raises(MeasureError, match="make a new one"):
            dispatcher.measure(_requests(1))


class TestHere(ExecutorContract):
    def executor(self, clock: Clock) -> Executor:
        return LocalExecutor(_Quiet())


class TestReliableRemote(ExecutorContract):
    def executor(self, clock: Clock) -> Executor:
        return RemoteExecutor(_run, clock, Misfortune(), 0)


class TestRemoteThatLosesAndRepeats(ExecutorContract):
    def executor(self, clock: Clock) -> Executor:
        return RemoteExecutor(_run, clock, Misfortune(twice=0.5), 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_misfortune_costs_time_but_no_result(seed: int) -> None:
    """With as many attempts as it takes, every result is the candidate's own, told exactly once."""
    rng = random.Random(seed)
    luck = Misfortune(
        delay=rng.choice((0.0, 5.0, 80.0)), silent=rng.random() * 0.4, told=rng.random() * 0.3,
        torn=rng.random() * 0.3, twice=rng.random() * 0.6, late=rng.random() * 0.4,
    )
    clock = Clock()
    executor = RemoteExecutor(_run, clock, luck, seed, capacity=rng.randint(1, 9))
    dispatcher = Dispatcher(executor, OPTIONS, attempts=10_000, grace=rng.choice((1.0, 30.0)), clock=clock)
    for _ in range(3):  # answers to one batch arrive in the next ones
        requests = _requests(rng.randint(1, 30))
        told: list[tuple[int, MeasureResult]] = []
        results = dispatcher.measure(requests, lambda i, r, told=told: told.append((i, r)))
        assert results == [_result(r, 0) for r in requests]
        assert sorted(i for i, _ in told) == list(range(len(requests))) and all(results[i] == r for i, r in told)
    requests = _requests(rng.randint(1, 6))
    assert dispatcher.compare(requests, 4) == [_result(r, 4) for r in requests]
    submissions = Counter(job.id for job in executor.submitted)
    assert sum(submissions.values()) - len(submissions) <= dispatcher.lost


@pytest.mark.parametrize("seed", range(40))
def test_what_is_always_lost_has_failed_and_costs_nobody_else_anything(seed: int) -> None:
    def run(job: Job) -> Sequence[MeasureResult]:
        return () if int(job.requests[0].trace) % 3 == 0 else _run(job)  # torn every time

    clock = Clock()
    executor = RemoteExecutor(run, clock, Misfortune(twice=0.3), seed)
    dispatcher = Dispatcher(executor, OPTIONS, attempts=3, clock=clock)
    requests = _requests(20)
    for number, result in enumerate(dispatcher.measure(requests)):
        if number % 3 == 0:
            assert result.failure == "timeout" and "3 submissions" in result.detail
        else:
            assert result == _result(requests[number], 0)
    assert max(Counter(job.id for job in executor.submitted).values()) == 3


def test_silence_ends_at_the_deadline() -> None:
    clock = Clock()
    dispatcher = Dispatcher(
        RemoteExecutor(_run, clock, Misfortune(silent=1.0), 0), OPTIONS, attempts=2, grace=5.0, clock=clock
    )
    (result,) = dispatcher.measure(_requests(1))
    assert result.failure == "timeout" and clock.now == 2 * (OPTIONS.timeout + 5.0) and dispatcher.lost == 2


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_no_more_is_submitted_than_there_is_room_for(capacity: int) -> None:
    clock = Clock()
    executor = RemoteExecutor(_run, clock, Misfortune(), 0, capacity=capacity)
    Dispatcher(executor, OPTIONS, clock=clock).measure(_requests(50))
    assert executor.most_at_once == capacity


def test_an_interrupt_keeps_what_is_known() -> None:
    clock = Clock()
    told: dict[int, MeasureResult] = {}

    class Interrupted(RemoteExecutor):
        polls = 0

        def poll(self, timeout: float) -> list[Answer]:
            self.polls += timeout > 0
            if self.polls == 3 and timeout > 0:
                clock.now += 50.0  # everything has arrived when the user's patience ends
                raise KeyboardInterrupt
            return super().poll(timeout)

    executor = Interrupted(_run, clock, Misfortune(), 1, capacity=5)
    with pytest.raises(KeyboardInterrupt):
        Dispatcher(executor, OPTIONS, clock=clock).measure(_requests(9), told.__setitem__)
    answered = {int(job.requests[0].trace) for job in executor.submitted}
    assert set(told) == answered and len(told) >= 5
    assert all(told[i] == _result(_requests(9)[i], 0) for i in told)


@pytest.mark.parametrize(("options", "call"), [
    ({"attempts": 0}, lambda d: None), ({}, lambda d: d.compare(_requests(2), 0)),
])
def test_what_cannot_be_asked(options: dict, call) -> None:  # type: ignore[type-arg, no-untyped-def]
    with pytest.raises(MeasureError) as caught:
        call(Dispatcher(LocalExecutor(_Quiet()), OPTIONS, **options))
    assert "\n" not in str(caught.value)


def test_an_executor_without_devices_is_told_of() -> None:
    clock = Clock()
    dispatcher = Dispatcher(RemoteExecutor(_run, clock, Misfortune(), 0, capacity=0), OPTIONS, clock=clock)
    with pytest.raises(MeasureError, match="give it a device"):
        dispatcher.measure(_requests(1))
