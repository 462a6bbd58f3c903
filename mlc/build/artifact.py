"""The artifact: one file that holds code, weights and everything that must be known to run them.

::

    0               a shared library, as the linker wrote it: plain TVM loads the file as a module
    page boundary   header: magic, version, checksum and length of the metadata, length of the whole file
                    metadata: JSON
    page boundary   weights, each at a multiple of 64 bytes, mapped into memory as they are

The loader of shared libraries ignores what follows one, and the metadata is read without running any code. Where the
library ends is read from its own ELF header.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from mlc.build.runtime import ALIGNMENT
from mlc.errors import ArtifactError

__all__ = ["FORMAT", "Artifact", "mapped_weights", "read", "write"]

#: raised when a reader of the version before could not read what is written now
FORMAT = 1
_MAGIC = b"mlc\x00art\n"
_HEADER = struct.Struct("<8sIIQQ")  # magic, format, crc32 of the metadata, its bytes, bytes of the file
_PAGE = 4096
_ELF = b"\x7fELF"


@dataclass(frozen=True)
class Artifact:
    """What :func:`read` found. ``weights_at`` is where the weights begin, in bytes."""

    path: Path
    code_bytes: int
    metadata: dict[str, Any]
    weights_at: int

    def code(self) -> bytes:
        """The shared library alone."""
        with self.path.open("rb") as file:
            return file.read(self.code_bytes)


def write(path: Path, code: bytes, metadata: dict[str, Any], weights: Sequence[np.ndarray]) -> None:
    """Write an artifact; it appears under its name when it is complete.

    ``weights`` are contiguous, in the order of ``metadata["weights"]``, whose offsets are filled in here.
    """
    table, payload = _layout(metadata["weights"], weights)
    text = json.dumps({**metadata, "weights": table}, separators=(",", ":")).encode()
    header_at = _aligned(len(code), _PAGE)
    weights_at = _aligned(header_at + _HEADER.size + len(text), _PAGE)
    header = _HEADER.pack(_MAGIC, FORMAT, zlib.crc32(text), len(text), weights_at + payload)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(code)
                file.seek(header_at)
                file.write(header + text)
                for entry, array in zip(table, weights, strict=True):
                    file.seek(weights_at + entry["offset"])
                    file.write(array.reshape(-1).view(np.uint8).data)
                file.truncate(weights_at + payload)
                os.fchmod(file.fileno(), 0o777 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ArtifactError(f"{path} must be writable, but {error.strerror or error}; give another path") from error


def _layout(
    entries: Sequence[dict[str, Any]], weights: Sequence[np.ndarray]
) -> tuple[list[dict[str, Any]], int]:
    """The table with offsets from the first weight, and the bytes of all weights."""
    table, end = [], 0
    for entry, array in zip(entries, weights, strict=True):
        start = _aligned(end, ALIGNMENT)
        table.append({**entry, "offset": start, "bytes": array.nbytes})
        end = start + array.nbytes
    return table, end


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: str | os.PathLike[str]) -> Artifact:
    """Read the metadata of an artifact, nothing else.

    Raises :class:`ArtifactError` for a file that is missing, no artifact, cut short, or of a later format.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read(path, file, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise ArtifactError(f"the compiled model must exist, but {path} does not; make it with `mlc compile`") from None
    except OSError as error:
        raise ArtifactError(f"the compiled model must be readable, but {path} is not: {error.strerror}") from error


def _read(path: Path, file: IO[bytes], size: int) -> Artifact:
    code_bytes = _elf_bytes(file)
    if code_bytes is None:
        raise ArtifactError(f"a compiled model must be a file that `mlc compile` wrote, but {path} is none")
    if code_bytes > size:
        raise _truncated(path, size, code_bytes)
    at = _aligned(code_bytes, _PAGE)
    file.seek(at)
    header = file.read(_HEADER.size)
    if header[: len(_MAGIC)] != _MAGIC[: len(header)] or not header:
        raise ArtifactError(f"{path} is a shared library, but holds no compiled model (or was stripped of it); "
                            "make one with `mlc compile`")
    if len(header) < _HEADER.size:
        raise _truncated(path, size, at + _HEADER.size)
    _, version, checksum, text_bytes, total = _HEADER.unpack(header)
    if version != FORMAT:
        raise ArtifactError(f"{path} has format {version}, but this mlc reads format {FORMAT}; compile the model again")
    if size < total:
        raise _truncated(path, size, total)
    text = file.read(text_bytes)
    if zlib.crc32(text) != checksum:
        raise ArtifactError(f"the metadata in {path} must match its checksum, but is damaged; compile the model again")
    return Artifact(path, code_bytes, json.loads(text), _aligned(at + _HEADER.size + text_bytes, _PAGE))


def _truncated(path: Path, size: int, wanted: int) -> ArtifactError:
    return ArtifactError(f"{path} is cut short: it must have at least {wanted} bytes, but has {size}; copy it again")


def _elf_bytes(file: IO[bytes]) -> int | None:
    """Where a 64-bit ELF file ends: after its section headers, which linkers write last. None for other files."""
    head = file.read(64)
    if len(head) < 64 or head[:4] != _ELF or head[4] != 2:
        return None
    order = "<" if head[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", head, 0x28)
    entry, count = struct.unpack_from(f"{order}HH", head, 0x3A)
    return int(offset + entry * count)


def mapped_weights(artifact: Artifact) -> list[np.ndarray]:
    """The weights as bytes, mapped from the file: nothing is read until it is used, and no process copies them.

    The mapping is private and may be written to (as DLPack wants); the file never changes.
    """
    table = artifact.metadata["weights"]
    if not any(entry["bytes"] for entry in table):
        return [np.empty(0, np.uint8) for _ in table]
    payload = np.memmap(artifact.path, np.uint8, "c", artifact.weights_at)
    return [payload[entry["offset"] : entry["offset"] + entry["bytes"]] for entry in table]
