"""What was measured stays on disk, whatever ends a benchmark, and is not measured again unless asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.performance.results import Results, write_whole


class Measured:
    """Counts its calls; breaks on the models of ``broken``."""

    def __init__(self, broken: str = "") -> None:
        self.calls: list[str] = []
        self._broken = broken

    def __call__(self, model: str) -> dict[str, object]:
        if model == self._broken:
            raise KeyboardInterrupt
        self.calls.append(model)
        return {"model": model, "call": len(self.calls)}


def _stored(folder: Path) -> list[tuple[str, int]]:
    return [(row["model"], row["call"]) for row in json.loads((folder / "results.json").read_text())]


def test_an_interrupted_benchmark_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "bench"
    with pytest.raises(KeyboardInterrupt):
        list(Results(folder).fill(["a", "b", "c"], Measured("c")))
    assert _stored(folder) == [("a", 1), ("b", 2)] and [f.name for f in folder.iterdir()] == ["results.json"]
    later = Measured()
    results = Results(folder)
    assert [row["model"] for row in results.fill(["a", "b", "c", "d"], later)] == ["c", "d"] == later.calls
    assert list(results.rows) == ["a", "b", "c", "d"]


def test_a_row_is_on_disk_when_it_is_told(tmp_path: Path) -> None:
    for count, row in enumerate(Results(tmp_path).fill(["a", "b"], Measured()), start=1):
        assert len(_stored(tmp_path)) == count and _stored(tmp_path)[-1][0] == row["model"]


def test_what_is_measured_again_keeps_its_place(tmp_path: Path) -> None:
    measured = Measured()
    list(Results(tmp_path).fill(["a", "b"], measured))
    assert list(Results(tmp_path).fill(["a", "b"], measured)) == []
    (again,) = Results(tmp_path).fill(["a"], measured, again=True)
    assert again == {"model": "a", "call": 3} and _stored(tmp_path) == [("a", 3), ("b", 2)]


def test_a_file_that_is_cut_short_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.md"
    write_whole(file, "old")

    def torn(path: Path, text: str, **_: object) -> int:
        path.write_bytes(text[:1].encode())
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", torn)
        with pytest.raises(OSError, match="no space"):
            write_whole(file, "new")
    assert file.read_text() == "old"
    write_whole(file, "new")
    assert file.read_text() == "new" and [f.name for f in tmp_path.iterdir()] == ["table.md"]
