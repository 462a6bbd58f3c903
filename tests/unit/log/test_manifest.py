"""Files that ship are what their checksums say, and the tools that write them note it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import tuning_logs
from mlc.errors import LogError
from mlc.log import manifest, shipped
from mlc.target import Target
from mlc.tuning import learn

SHIPPED = Path(tuning_logs.__file__).parent
TARGET = Target("x86-64-v4", '{"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}')


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what ships, which the product takes for it."""
    root = tmp_path / "tuning_logs"
    shutil.copytree(SHIPPED, root, ignore=shutil.ignore_patterns("samples", "__pycache__"))
    for module in (shipped, learn, manifest):
        monkeypatch.setattr(module.resources, "files", {"tuning_logs": root}.__getitem__)
    return root


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_file_that_ships_is_listed() -> None:
    listed = json.loads((SHIPPED / manifest.NAME).read_text())
    tracked = subprocess.run(["git", "ls-files", "."], cwd=SHIPPED, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    wanted = {name for name in tracked.stdout.split() if "/" in name and not name.startswith("samples/")}
    assert wanted == set(listed)
    for name in listed:
        manifest.check(SHIPPED / name)


def test_a_digit_that_changed_in_a_shipped_log_is_found(package: Path) -> None:
    log = package / "x86-64-v4" / "models.jsonl"
    assert shipped.shipped_records(TARGET)
    data = log.read_bytes()
    at = data.index(b'"times":[') + len(b'"times":[')
    log.write_bytes(data[:at] + (b"8" if data[at : at + 1] != b"8" else b"9") + data[at + 1 :])
    with pytest.raises(LogError, match=r"a shipped file must match its checksum, but .*models\.jsonl is damaged"):
        shipped.shipped_records(TARGET)


def test_a_shipped_file_that_is_gone_is_told(package: Path) -> None:
    (package / "x86-64-v4" / "models.jsonl").unlink()
    with pytest.raises(LogError, match=r"must be there, but .* is missing; reinstall mlc"):
        shipped.shipped_records(TARGET)


def test_a_damaged_cost_model_is_found(package: Path) -> None:
    file = package / "x86-64-v4" / learn.MODEL_FILE
    assert learn.pretrained(TARGET)[0] is not None
    _flip(file, 10)  # of a time stamp, which no archive checks
    with pytest.raises(LogError, match=r"must match its checksum, but .*cost_model\.npz is damaged"):
        learn.pretrained(TARGET)


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": 1}', b"\xff", b"[" * 100_000])
def test_a_damaged_list_is_told(package: Path, content: bytes) -> None:
    (package / manifest.NAME).write_bytes(content)
    with pytest.raises(LogError, match="the checksums of shipped files must be") as caught:
        shipped.shipped_records(TARGET)
    assert "\n" not in str(caught.value)


def test_what_is_written_is_noted_and_what_is_gone_is_dropped(package: Path) -> None:
    before = set(json.loads((package / manifest.NAME).read_text()))
    (package / "x86-64-v3" / "models.jsonl").unlink()
    new = package / "cuda-sm_90" / "models.jsonl"
    new.parent.mkdir()
    new.write_text("")
    assert manifest.ships(new) and not manifest.ships(package.parent / "elsewhere" / "models.jsonl")
    manifest.note(new)
    listed = json.loads((package / manifest.NAME).read_text())
    assert set(listed) == before - {"x86-64-v3/models.jsonl"} | {"cuda-sm_90/models.jsonl"}
    manifest.check(new)
    new.write_text("x")
    with pytest.raises(LogError, match="must match its checksum"):
        manifest.check(new)
