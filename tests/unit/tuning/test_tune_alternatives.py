"""Several functions that compute the same: which one the model runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from session_runs import BEST, tune
from tuning_tasks import matmul

from mlc.log import TuningLog
from mlc.testing.measuring import FakeMeasurer, bowl
from mlc.tuning.events import BatchMeasured

pytestmark = pytest.mark.usefixtures("small_space")


def test_the_model_runs_the_fastest_of_its_alternatives(log: TuningLog) -> None:
    tasks = [matmul(64, 64, 32).competing("one"), matmul(32, 64, 32), matmul(64, 128, 64).competing("one")]
    fast, _, slow = tasks
    times = {fast.key: 1.0, slow.key: 3.0}

    class Uneven(FakeMeasurer):
        def _result(self, request, repeats):  # type: ignore[no-untyped-def]
            result = super()._result(request, repeats)
            return replace(result, times=tuple(t * times.get(request.task_key, 1.0) for t in result.times))

    measurer = Uneven(bowl(BEST))
    report, listener = tune(log, measurer, tasks, trials=60)
    by_key = {t.key: t for t in report.tasks}
    compared = [requests[0].task_key for requests in measurer.compared]
    assert sorted(compared) == sorted(t.key for t in tasks[:2]), "what has lost need not be timed exactly"
    assert by_key[slow.key].verdict == "unconfirmed"
    assert [t.key for t in report.used] == [tasks[0].key, tasks[1].key]
    assert report.best_latency == pytest.approx(by_key[fast.key].best_seconds + by_key[tasks[1].key].best_seconds)
    assert report.default_latency == pytest.approx(
        by_key[fast.key].default_seconds + by_key[tasks[1].key].default_seconds
    )
    last = [e for e in listener.of(BatchMeasured)][-1]
    assert last.latency is not None and last.latency < 3e-3  # type: ignore[union-attr]
    assert 0 < by_key[slow.key].trials < by_key[fast.key].trials


@pytest.mark.parametrize("apart", [1.0, 1.2])
def test_close_alternatives_are_timed_in_turn_and_the_log_has_times_that_can_be_compared(
    log: TuningLog, apart: float
) -> None:
    """The machine was slow while one of them was searched, and the other looks faster for that."""
    fast, slow = (matmul(64, 64, 32).competing("one"), matmul(64, 128, 64).competing("one"))

    class Drifting(FakeMeasurer):
        def measure(self, requests, on_result=None):  # type: ignore[no-untyped-def]
            factor = apart if requests[0].task_key == fast.key else 1.0
            return [replace(r, times=tuple(factor * t for t in r.times)) for r in super().measure(requests, on_result)]

        def compare(self, requests, rounds):  # type: ignore[no-untyped-def]
            self.compared.append(list(requests))
            factor = apart if {r.task_key for r in requests} == {fast.key} else 1.0
            return [replace(r, times=tuple(factor * t for t in r.times)) for r in self._results(requests, rounds)]

        def _results(self, requests, rounds):  # type: ignore[no-untyped-def]
            results = [self._result(request, rounds) for request in requests]
            return [replace(result, times=tuple(t * (1.1 if request.task_key == slow.key else 1.0)
                                                for t in result.times))
                    for request, result in zip(requests, results, strict=True)]

    measurer = Drifting(bowl(BEST))
    report, _ = tune(log, measurer, [fast, slow], trials=160)
    together = [requests for requests in measurer.compared if len({r.task_key for r in requests}) == 2]
    assert [len(requests) for requests in together] == [2], "the best of each, once"
    times = [log.best(task.key).seconds for task in (fast, slow)]
    assert times[1] / times[0] == pytest.approx(1.1)
    assert report.best_latency == pytest.approx(times[0])


def test_alternatives_that_were_settled_before_are_not_timed_again(log: TuningLog) -> None:
    tasks = [matmul(64, 64, 32).competing("one"), matmul(64, 128, 64).competing("one")]
    tune(log, FakeMeasurer(bowl(BEST)), tasks, trials=60)
    measurer = FakeMeasurer(bowl(BEST))
    again, _ = tune(log, measurer, [*tasks, matmul(32, 64, 32, weight=100)], trials=1)
    assert again.trials == 1
    assert not [requests for requests in measurer.compared if len({r.task_key for r in requests}) == 2]
