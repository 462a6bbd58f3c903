"""One log file: what goes in comes out, from several threads and processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from log_records import VERSIONS, key, record

from mlc.errors import LogError
from mlc.log import Record, TuningLog, Verdict
from mlc.log.codec import MalformedRecord, canonical_text, parse_text
from mlc.log.layers import Layers, MemoryLog

HERE = Path(__file__).parent  # where the writers find log_records
WRITER = """
import sys
from mlc.log import TuningLog
from log_records import record
path, writer = sys.argv[1], int(sys.argv[2])
with TuningLog(path) as log:
    for batch in range(10):
        log.append([record(10 * batch + i, writer, ok=i % 4 > 0) for i in range(10)])
"""


def test_a_record_comes_back_as_it_went_in(tmp_path: Path) -> None:
    first, second = record(1), record(2, task=5, ok=False)
    with TuningLog(tmp_path / "new folder" / "a?b #c.db") as log:
        assert log.append([first, second]) == 2
    with TuningLog(tmp_path / "new folder" / "a?b #c.db", readonly=True) as log:
        assert list(log.records()) == [first, second]
        assert list(log.records(task_key=key(5))) == [second]
        assert list(log.records(session="nobody")) == []
        assert log.count() == 2


def test_best_is_what_was_kept_until_something_is_clearly_faster(tmp_path: Path) -> None:
    def at(trial: int, seconds: float, verdict: str = "") -> Record:
        return replace(record(trial, ok=True), times=(seconds,) * 3, verdict=Verdict(verdict) if verdict else None)

    lucky, kept, rejected = at(0, 0.5), at(1, 1.0, "kept"), at(2, 1.1, "rejected")
    steps = [
        ([lucky], lucky),  # one fast measurement is all there is
        ([rejected, kept], kept),  # timed in turn with the default, it did not hold
        ([at(3, 0.97)], kept),  # within the noise of single measurements
        ([at(4, 0.90)], at(4, 0.90)),
        ([at(5, 0.85)], at(5, 0.85)),
        ([at(6, 0.95, "kept")], at(6, 0.95, "kept")),
    ]
    history: list[Record] = []
    with TuningLog(tmp_path / "log.db") as log:
        for written, expected in steps:
            history += written
            log.append(written)
            assert log.best(key(0)) == expected
            assert MemoryLog(history).best(key(0)) == expected


def test_best_is_the_fastest_median_and_never_a_failure(tmp_path: Path) -> None:
    with TuningLog(tmp_path / "log.db") as log:
        records = [record(i, i % 3, ok=i % 4 > 0) for i in range(60)] + [record(99, 7, ok=False)]
        log.append(records)
        for task in range(3):
            expected = min((r for r in records if r.task_key == key(task)), key=lambda r: r.seconds)
            assert log.best(key(task)) == expected
        assert log.best(key(7)) is None
        assert log.best(key(8)) is None
        summaries = {s.task_key: s for s in log.tasks()}
        assert summaries[key(7)].best_seconds == float("inf") and summaries[key(7)].failures == 1
        assert summaries[key(1)].records == 20 and summaries[key(1)].task_name == "fused_conv2d_1"
        assert summaries[key(1)].best_seconds == log.best(key(1)).seconds  # type: ignore[union-attr]


def test_the_same_fact_is_stored_once_and_another_trial_is_another_fact(tmp_path: Path) -> None:
    with TuningLog(tmp_path / "log.db") as log:
        assert log.append([record(1), record(1)]) == 1
        assert log.append([record(1), replace(record(1), trial=2)]) == 1
        assert log.count() == 2


def test_numpy_scalars_are_numbers(tmp_path: Path) -> None:
    given = Record("k", "t", "s", {"tile": np.int64(4)}, "[]", (np.float32(0.5), np.float64(0.25)), seed=np.int32(3))
    with TuningLog(tmp_path / "log.db") as log:
        log.append([given])
        assert next(log.records()) == Record("k", "t", "s", {"tile": 4}, "[]", (0.5, 0.25), seed=3)


def test_fields_that_were_texts_among_others_are_stored_as_they_were() -> None:
    """The text, and with it the digest, of a record that an earlier mlc wrote."""
    given = replace(record(1), verdict=Verdict.KEPT, code="c0de", slowness=1.5, made_for="llvm/x86-64-v4/2")
    text = canonical_text(given)
    stored = {"code": "c0de", "predicted": "1.5e-3", "shipped": "llvm/x86-64-v4/2", "slowness": "1.50",
              "verdict": "kept"}
    assert json.loads(text)["extra"] == stored and "verdict" not in json.loads(text)
    assert parse_text(text) == given
    for bad in ({"verdict": "liked"}, {"slowness": "much"}, {"slowness": "1.5"}, {"code": ""}):
        with pytest.raises(MalformedRecord, match=next(iter(bad))):
            parse_text(json.dumps({**json.loads(text), "extra": bad}))


@pytest.mark.parametrize("change", [
    {"extra": {"verdict": "kept"}},
    {"times": (float("nan"),)}, {"times": (float("inf"),)}, {"times": (-1.0,)}, {"times": (0.0,)}, {"failure": "sad"},
    {"task_key": ""}, {"decisions": {"a": "b"}}, {"decisions": {"a": 1.5}}, {"extra": {"a": 1}}, {"trial": "1"},
    {"when": float("nan")}, {"detail": None}, {"seed": 2**64},
])  # fmt: skip
def test_what_could_not_be_read_back_is_refused_and_nothing_of_its_batch_stored(
    tmp_path: Path, change: dict[str, object]
) -> None:
    with TuningLog(tmp_path / "log.db") as log:
        with pytest.raises(LogError, match=next(iter(change))):
            log.append([record(1), replace(record(2), **change)])  # type: ignore[arg-type]
        assert log.count() == 0


def test_other_versions_are_kept_counted_and_never_matched(tmp_path: Path) -> None:
    with TuningLog(tmp_path / "log.db") as log:
        log.append([record(1), record(2), record(3, versions="tvm0.26.0-llvm19")])
        assert log.by_versions() == {VERSIONS: 2, "tvm0.26.0-llvm19": 1}
        best = log.best(key(0))
        assert best is not None and best.versions == VERSIONS
        assert {s.versions for s in log.tasks()} == {VERSIONS, "tvm0.26.0-llvm19"}


def test_state_and_sessions_survive_closing(tmp_path: Path) -> None:
    blob = np.random.default_rng(0).bytes(100_000)
    with TuningLog(tmp_path / "log.db") as log:
        assert log.get_state("model") is None
        log.put_state("model", b"old")
        log.put_state("model", blob)
        session = log.start_session({"trials": 256, "model": "net.onnx"})
        log.append([record(1, session=session.id)], replace(session, trials=1, seconds=0.5))
        later = log.start_session({"trials": 8})
        log.update_session(later, trials=8, seconds=3.25)
    with TuningLog(tmp_path / "log.db") as log:
        assert log.get_state("model") == blob
        first, second = log.sessions()
        assert first == replace(session, trials=1, seconds=0.5) and first.options["trials"] == 256
        assert (second.id, second.trials, second.seconds) == (later.id, 8, 3.25)
        assert [r.trial for r in log.records(session=first.id)] == [1]


def test_several_processes_create_and_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(i)], cwd=HERE) for i in range(4)]
    assert [w.wait(60) for w in writers] == [0, 0, 0, 0]
    with TuningLog(path, readonly=True) as log:
        assert log.count() == 400
        for writer in range(4):
            assert {r.trial for r in log.records(key(writer))} == set(range(100))


def test_several_threads_share_one_log_and_a_reader_sees_whole_batches(tmp_path: Path) -> None:
    log, reader = TuningLog(tmp_path / "log.db"), None
    threads = [
        threading.Thread(target=lambda t=t: [log.append([record(i, t), record(i + 1000, t)]) for i in range(20)])
        for t in range(3)
    ]
    for thread in threads:
        thread.start()
    reader = TuningLog(tmp_path / "log.db", readonly=True)
    while any(thread.is_alive() for thread in threads):
        assert reader.count() % 2 == 0
    assert log.count() == reader.count() == 120
    log.close()
    log.close()
    reader.close()


def test_records_can_be_appended_while_they_are_iterated(tmp_path: Path) -> None:
    with TuningLog(tmp_path / "log.db") as log:
        log.append(record(i) for i in range(600))
        seen = 0
        for found in log.records(key(0)):
            log.append([record(found.trial, task=1)])
            seen += 1
        assert seen == 600 and log.count() == 1200


@pytest.mark.slow
def test_a_million_records_are_no_slower(tmp_path: Path) -> None:
    path, tasks = tmp_path / "log.db", 500
    with TuningLog(path) as log:
        from mlc.log.store import row_of

        _, _, session, _, body, _ = row_of(record(0))
        for start in range(0, 1_000_000, 20_000):
            rng = np.random.default_rng(start)
            trials = range(start, start + 20_000)
            log.append_rows([(rng.bytes(16), key(i % tasks), session, 1 + rng.random(), body, 0) for i in trials])
        log.append(record(i, i) for i in range(tasks))  # faster, and as they were written: those that are best
    start_time = time.perf_counter()
    with TuningLog(path) as log:
        assert time.perf_counter() - start_time < 1.0
        spent = _times(lambda i: log.best(key(i % tasks)), 200)
        assert np.median(spent) < 0.010
        spent = _times(lambda i: log.append([record(tasks + i)]), 100)
        assert np.median(spent) < 0.005
        assert log.count() == 1_000_600 and log.damaged == 0


def _times(call: object, count: int) -> list[float]:
    spent = []
    for i in range(count):
        start = time.perf_counter()
        call(i)  # type: ignore[operator]
        spent.append(time.perf_counter() - start)
    return spent


@pytest.mark.parametrize("kept", [None, 0, 1])
def test_the_best_of_several_keys_is_that_of_all_their_records(tmp_path: Path, kept: int | None) -> None:
    """A task has records under its present key and under one that it had before."""
    times = ((0, 3e-3), (1, 1e-3), (0, 2e-3))
    history = [replace(record(i, task), times=(seconds,)) for i, (task, seconds) in enumerate(times)]
    if kept is not None:  # what a comparison in turn kept goes before what is not clearly faster, whatever its key
        history.append(replace(record(4, kept), times=(1.01e-3,), verdict=Verdict.KEPT))
    with TuningLog(tmp_path / "log.db") as log:
        log.append(history)
        expected = history[-1] if kept is not None else history[1]
        for keys in ((key(0), key(1)), (key(1), key(0)), (key(9), key(1), key(0))):
            assert log.best(*keys) == expected
        assert log.best(key(0)) == (history[-1] if kept == 0 else history[2])
        assert log.best(key(8), key(9)) is None
    assert MemoryLog(history).best(key(1), key(0)) is not None
    assert MemoryLog(history[:3]).best(key(0), key(1)) == history[1]
    assert Layers([MemoryLog(history[:1]), MemoryLog(history[1:])]).best(key(1), key(0)) == history[0], "own ones first"
