"""Weights are timed as cold as a model finds them."""

from __future__ import annotations

import time

import pytest
from measure_tasks import TARGET, gemm, request, traces

from mlc.measure import MeasureRequest
from mlc.measure.compiling_runner import CompilingRunner, params_of
from mlc.measure.data import random_arrays
from mlc.measure.rotation import Rotation, copies_of

MB = 1 << 20


@pytest.mark.parametrize(("size", "all_weights", "last_level", "copies"), [
    (0, 100 * MB, 32 * MB, 1),  # no weights
    (2 * MB, 2 * MB, 32 * MB, 1),  # the only weight of its model stays where it is
    (2 * MB, 10 * MB, 32 * MB, 5),  # a model that fits into the last cache
    (2 * MB, 400 * MB, 32 * MB, 32),  # twice the cache are enough
    (400 * MB, 500 * MB, 32 * MB, 1),  # it drives itself out
    (3 * MB, 10 * MB, 32 * MB, 4),
    (64, 400 * MB, 32 * MB, 1024),
    (4 * MB, 2000 * MB, 1024 * MB, 128),  # memory is not spent without bound
])
def test_copies_are_as_large_together_as_the_models_weights_as_far_as_caches_reach(
    size: int, all_weights: int, last_level: int, copies: int
) -> None:
    assert copies_of(size, all_weights, last_level) == copies


def test_calls_go_round_and_the_time_is_of_one() -> None:
    heard: list[int] = []

    def function(number: int) -> None:
        heard.append(number)
        time.sleep(0.002)

    rotation = Rotation(function, [(0,), (1,), (2,)])
    assert 0.002 <= rotation.seconds(4) < 0.02
    rotation.seconds(3)
    assert heard == [0, 1, 2, 0, 1, 2, 0]


def test_what_calls_only_begin_is_waited_for() -> None:
    """As on a GPU: a call returns at once, and the work of before is not counted."""
    begun = [0] * 100

    def synchronise() -> None:
        time.sleep(0.002 * len(begun))
        begun.clear()

    seconds = Rotation(begun.append, [(0,), (1,)], synchronise).seconds(5)
    assert 0.002 <= seconds < 0.02


def _job(bench: CompilingRunner, made: MeasureRequest, path: str) -> dict:
    job = {"func": made.func, "target": made.target, "trace": made.trace, "scheduled": "", "path": path,
           "reference": path, "batch": 1, "id": 0, "constants": list(made.constants),
           "constant_bytes": made.constant_bytes, "rtol": 1e-3, "repeats": 3, "warmup_runs": 1,
           "min_repeat_seconds": 1e-3, "cutoff": 0.0, "most_repeats": 9, "best": 0.0,
           "baseline": "", "baseline_seconds": 0.0, "exact": False}
    bench.reference(job)
    bench.build(job)
    return job


def test_weights_get_copies_with_equal_values_and_activations_do_not(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("mlc.measure.runner.native_last_level", lambda: 1 << 16)
    func = gemm(48, 64, 40)
    plain = request(func, traces(func, 1)[0])
    made = MeasureRequest(plain.task_key, plain.func, TARGET.attrs, plain.trace, constants=(1,), constant_bytes=9 * MB)
    bench = CompilingRunner(2)
    job = _job(bench, made, str(tmp_path / "reference.npz"))
    assert len(bench.run(job)["times"]) == 3
    (data,) = bench._data.values()
    weight = 40 * 64 * 4
    assert len(data.turns) == -(-2 * (1 << 16) // weight)
    assert len({t[0].data_ptr() for t in data.turns}) == len({t[2].data_ptr() for t in data.turns}) == 1
    assert len({t[1].data_ptr() for t in data.turns}) == len(data.turns)
    expected = random_arrays(params_of(func), "normal")[1]
    assert all((turn[1].numpy() == expected).all() for turn in data.turns)
    assert data.size == 4 * (48 * 40 + 48 * 64) + weight * len(data.turns)
    times = bench.interleave({"runs": [job], "estimates": [1e-5], "rounds": 4, "min_repeat_seconds": 1e-3})["times"]
    assert [len(t) for t in times] == [4]


def test_a_model_without_weights_is_timed_on_the_same_buffers(tmp_path) -> None:
    func = gemm(48, 64, 40)
    bench = CompilingRunner(2)
    bench.run(_job(bench, request(func, traces(func, 1)[0]), str(tmp_path / "reference.npz")))
    (data,) = bench._data.values()
    assert len(data.turns) == 1
