"""The file: what is where, what is read back, and what is never left half written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from mlc.build import artifact
from mlc.build.runtime import ALIGNMENT
from mlc.errors import ArtifactError

PAGE = 4096


def _elf(size: int) -> bytes:
    """The outline of a shared library: a header whose section table ends after ``size`` bytes."""
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    head[0x28:0x30] = (size - 2 * 64).to_bytes(8, "little")
    head[0x3A:0x3E] = (64).to_bytes(2, "little") + (2).to_bytes(2, "little")
    return bytes(head) + np.random.default_rng(0).bytes(size - 64)


def _arrays() -> tuple[list[dict[str, object]], list[np.ndarray]]:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((3, 5), dtype=np.float32), np.zeros((0, 4), np.float32),
              rng.integers(-9, 9, 7), np.asarray(2.5, np.float64), rng.standard_normal(5000).astype(np.float16)]
    return [{"shape": list(a.shape), "dtype": str(a.dtype)} for a in arrays], arrays


@pytest.mark.parametrize("code_bytes", [200, PAGE, 3 * PAGE + 1])
def test_what_is_written_is_read_back(tmp_path: Path, code_bytes: int) -> None:
    table, arrays = _arrays()
    path = tmp_path / "a file.so"
    metadata = {"name": "größer", "nested": {"list": [1, 2.5, None]}, "weights": table}
    artifact.write(path, _elf(code_bytes), metadata, arrays)
    found = artifact.read(path)
    assert found.code == _elf(code_bytes)
    assert {k: v for k, v in found.metadata.items() if k != "weights"} == {
        k: v for k, v in metadata.items() if k != "weights"}
    for entry, data, array in zip(found.metadata["weights"], found.weights, arrays, strict=True):
        assert (entry["shape"], entry["dtype"], entry["bytes"]) == (list(array.shape), str(array.dtype), array.nbytes)
        assert entry["offset"] % ALIGNMENT == 0
        assert data.size == 0 or data.ctypes.data % ALIGNMENT == 0
        np.testing.assert_array_equal(data.view(array.dtype).reshape(array.shape), array)
    assert found.weights_at % PAGE == 0
    assert stat.S_IMODE(path.stat().st_mode) & 0o444


def test_no_weights_at_all(tmp_path: Path) -> None:
    artifact.write(tmp_path / "m.so", _elf(300), {"weights": []}, [])
    found = artifact.read(tmp_path / "m.so")
    assert found.weights == [] and found.metadata == {"weights": []}


def test_mapped_weights_may_be_written_to_without_changing_the_file(tmp_path: Path) -> None:
    table, arrays = _arrays()
    path = tmp_path / "m.so"
    artifact.write(path, _elf(300), {"weights": table}, arrays)
    before = path.read_bytes()
    for data in artifact.read(path, verify=False).weights:
        data[...] = 7
    assert path.read_bytes() == before


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m.so"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="zip"):
        artifact.write(path, _elf(300), {"weights": _arrays()[0]}, [])
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["m.so"]


def test_a_folder_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="must be writable, but No such file or directory; give another path"):
        artifact.write(tmp_path / "none" / "m.so", _elf(300), {"weights": []}, [])
