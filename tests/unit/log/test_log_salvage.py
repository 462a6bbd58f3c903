"""Damaged files: what is left is found, verified and copied."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from log_records import VERSIONS, record

from mlc.errors import LogError
from mlc.log import Record, TuningLog, check, salvage

COUNT = 400


def _noise(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = random.Random(0).randbytes(min(stop, len(data)) - start)
    path.write_bytes(data)


def _truncate(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    path = tmp_path_factory.mktemp("whole") / "log.db"
    long = replace(record(5000), detail=random.Random(1).randbytes(20_000).hex())  # needs overflow pages
    records = [record(i, i % 7, ok=i % 5 > 0) for i in range(COUNT)] + [long]
    with TuningLog(path) as log:
        log.append(records)
        log.update_session(log.start_session({"trials": 400}, "s"), trials=COUNT, seconds=9.0)
    return path, records


@pytest.mark.parametrize(("damage", "least"), [
    (lambda p: _truncate(p, 0.95), 0.6), (lambda p: _truncate(p, 0.5), 0.2), (lambda p: _noise(p, 0, 4096), 0.95),
    (lambda p: _noise(p, 0, 16), 0.95), (lambda p: _noise(p, 40_000, 60_000), 0.7),
    (lambda p: _noise(p, 82_288, 82_388), 0.9),
])  # fmt: skip
def test_what_survived_is_copied_as_it_was(
    whole: tuple[Path, list[Record]], tmp_path: Path, damage: Callable[[Path], None], least: float
) -> None:
    path = Path(shutil.copy(whole[0], tmp_path / "torn.db"))
    damage(path)
    before = path.read_bytes()
    report = check(path)
    assert not report.ok and report.problems and "is damaged" in str(report)
    assert salvage(path, tmp_path / "saved.db").records == report.records
    assert path.read_bytes() == before
    with TuningLog(tmp_path / "saved.db") as log:
        saved = list(log.records())
    assert len(saved) == report.records >= least * COUNT
    assert all(found in whole[1] for found in saved)
    assert check(tmp_path / "saved.db").ok


def test_a_whole_log_is_whole_and_its_salvage_a_copy(whole: tuple[Path, list[Record]], tmp_path: Path) -> None:
    report = check(whole[0])
    assert report.ok and report.records == COUNT + 1 and report.by_versions == {VERSIONS: COUNT + 1}
    assert "is whole" in str(report)
    salvage(whole[0], tmp_path / "copy.db")
    with TuningLog(tmp_path / "copy.db") as log:
        assert sorted(r.trial for r in log.records()) == sorted(r.trial for r in whole[1])
        assert [(s.id, s.trials, s.seconds) for s in log.sessions()] == [("s", COUNT, 9.0)]


def test_long_records_and_sessions_are_saved_from_a_file_without_its_first_page(
    whole: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    path = Path(shutil.copy(whole[0], tmp_path / "torn.db"))
    _noise(path, 0, 4096)
    salvage(path, tmp_path / "saved.db")
    with TuningLog(tmp_path / "saved.db") as log:
        assert whole[1][-1] in list(log.records())
        assert [(s.id, s.trials) for s in log.sessions()] == [("s", COUNT)]


def test_records_still_in_the_write_ahead_log_are_saved(tmp_path: Path) -> None:
    log = TuningLog(tmp_path / "log.db")
    log.append(record(i) for i in range(20))
    for suffix in ("", "-wal"):  # as a kill leaves them
        shutil.copy(tmp_path / f"log.db{suffix}", tmp_path / f"torn.db{suffix}")
    log.close()
    (tmp_path / "torn.db").write_bytes(b"\0" * 4096)
    assert salvage(tmp_path / "torn.db", tmp_path / "saved.db").records == 20


def test_one_flipped_bit_in_a_record_is_noticed(whole: tuple[Path, list[Record]], tmp_path: Path) -> None:
    with TuningLog(whole[0], readonly=True) as log:
        body = next(row[4] for row in log.rows() if len(row[4]) < 1000)
    data = bytearray(whole[0].read_bytes())
    data[data.index(body) + len(body) // 2] ^= 1  # SQLite keeps no checksum of it
    (tmp_path / "flipped.db").write_bytes(data)
    report = check(tmp_path / "flipped.db")
    assert not report.ok and report.damaged == 1 and report.records == COUNT
    assert salvage(tmp_path / "flipped.db", tmp_path / "saved.db").records == COUNT


def test_salvage_overwrites_nothing(whole: tuple[Path, list[Record]], tmp_path: Path) -> None:
    (tmp_path / "there.db").write_bytes(b"precious")
    with pytest.raises(LogError, match=r"there\.db exists"):
        salvage(whole[0], tmp_path / "there.db")
    assert (tmp_path / "there.db").read_bytes() == b"precious"


def test_damage_that_sqlite_quotes_in_its_message(whole: tuple[Path, list[Record]], tmp_path: Path) -> None:
    path = Path(shutil.copy(whole[0], tmp_path / "names.db"))
    damaged = path.read_bytes().replace(b"records_by_task", b"records\xe1by(task")  # no UTF-8, and no SQL
    path.write_bytes(damaged)
    assert check(path).records == COUNT + 1
    with pytest.raises(LogError, match=r"must be whole, but .* is damaged"):
        TuningLog(path, readonly=True)
    with pytest.raises(LogError, match=r"must be whole, but .* is damaged"):
        TuningLog(path)
