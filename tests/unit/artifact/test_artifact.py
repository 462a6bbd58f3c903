"""The file: what is where, what is read back, and what is never left half written."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from mlc.artifact import artifact
from mlc.artifact.checksum import CHUNK, checksum, read_checked, sums
from mlc.artifact.runtime import ALIGNMENT
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


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.so"
    os.mkfifo(path)
    with pytest.raises(ArtifactError, match="must be writable, but it is a folder, a device or a pipe"):
        artifact.write(path, _elf(300), {"weights": []}, [])
    assert stat.S_ISFIFO(path.stat().st_mode) and os.listdir(tmp_path) == ["m.so"]


@pytest.mark.parametrize("total", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_chunks_have_checksums_however_they_are_written(total: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(total)
    data = rng.bytes(total)
    cuts = sorted({0, total, *(int(c) for c in rng.integers(0, total + 1, 5))})
    pieces = [data[a:b] for a, b in itertools.pairwise(cuts)]
    expected = [checksum(data[i : i + CHUNK]) for i in range(0, total, CHUNK)]
    assert sums(pieces) == expected
    path = tmp_path / "data"
    path.write_bytes(b"before" + data)
    with path.open("rb") as file:
        into = np.empty(total, np.uint8)
        assert read_checked(file.fileno(), 6, into, expected) is None and into.tobytes() == data
        if total:
            where = int(rng.integers(len(expected)))
            wrong = [value ^ (i == where) for i, value in enumerate(expected)]
            assert read_checked(file.fileno(), 6, into, wrong) == 6 + where * CHUNK
            longer = np.empty(len(expected) * CHUNK + 1, np.uint8)
            assert read_checked(file.fileno(), 6, longer, [*expected, 0]) is not None


def test_every_byte_is_checked(tmp_path: Path) -> None:
    """Not one of them may be another, wherever it is, padding included."""
    table, arrays = _arrays()
    path = tmp_path / "m.so"
    artifact.write(path, _elf(300), {"name": "m", "weights": table}, arrays)
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 16]))
        with pytest.raises(ArtifactError):
            artifact.read(path)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data[at : at + 1])
    artifact.read(path)


def test_weights_alone_may_be_taken_unchecked(tmp_path: Path) -> None:
    table, arrays = _arrays()
    path = tmp_path / "m.so"
    artifact.write(path, _elf(300), {"name": "m", "weights": table}, arrays)
    found, size = artifact.read(path), path.stat().st_size
    for at, verified in ((size - 1, True), (299, False), (found.weights_at - 1, False)):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        if verified:
            assert artifact.read(path, verify=False).weights[-1].tobytes() != found.weights[-1].tobytes()
            with pytest.raises(ArtifactError, match=r"the weights in .* must match its checksum"):
                artifact.read(path)
        else:
            with pytest.raises(ArtifactError, match="must match its checksum"):
                artifact.read(path, verify=False)
        data[at] ^= 1
        path.write_bytes(data)
