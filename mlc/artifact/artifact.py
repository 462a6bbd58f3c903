"""The artifact: one file that holds code, weights and everything that must be known to run them.

::

    0               a shared library, as the linker wrote it: plain TVM loads the file as a module
    page boundary   header: magic, version, length of the metadata, length of the whole file, checksum of these and
                    of the metadata
                    metadata: JSON, with the checksum of each chunk of the other two parts
    page boundary   weights, each at a multiple of 64 bytes, as the type that the metadata says they are stored as

The loader of shared libraries ignores what follows one, and the metadata is read without running any code. Where the
library ends is read from its own ELF header. Between the parts are zeros: no byte of the file is left unchecked.

What is read is the reader's own copy, and the copy is what is checked: nothing that happens to the file afterwards
changes it, and nothing can happen in between.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from mlc.artifact import metadata as description
from mlc.artifact.checksum import CHUNK, checksum, read_checked, sums
from mlc.artifact.narrow import narrowed, room, stored_type, widened
from mlc.artifact.runtime import ALIGNMENT
from mlc.errors import ArtifactError

__all__ = ["FORMAT", "Artifact", "nonsense", "read", "write"]

#: raised when a reader of the version before could not read what is written now
FORMAT = 3
_MAGIC = b"mlc\x00art\n"
_HEADER = struct.Struct("<8sI4xQQ")  # magic, format, bytes of the metadata, bytes of the file
_CHECKSUM = struct.Struct("<Q")  # of the header and the metadata; between them
_PAGE = 4096
_ELF = b"\x7fELF"
_SUMS = "checksums"


@dataclass(frozen=True)
class Artifact:
    """What :func:`read` found: the shared library, the metadata, and each weight as bytes, aligned and writable.

    ``weights_at`` is where in the file the weights begin, in bytes.
    """

    path: Path
    code: bytes
    metadata: dict[str, Any]
    weights: list[np.ndarray]
    weights_at: int


def write(path: Path, code: bytes, metadata: dict[str, Any], weights: Sequence[np.ndarray]) -> None:
    """Write an artifact; it appears under its name when it is complete, in place of what was there.

    ``weights`` are contiguous, in the order of ``metadata["weights"]``; where each is, and as which type it is stored
    (:mod:`mlc.artifact.narrow`), is filled in here. A process that has loaded what was there keeps it.
    """
    entries, weights = _stored(metadata["weights"], weights)
    table, payload = _layout(entries, weights)
    header_at = _aligned(len(code), _PAGE)
    found = {"code": sums([code, bytes(header_at - len(code))]), "weights": sums(_pieces(table, weights))}
    try:
        text = description.encoded({**metadata, "weights": table, _SUMS: found})
    except ValueError as error:
        raise ArtifactError(f"the metadata of {metadata.get('name')} cannot be written: {error}") from error
    weights_at = _aligned(header_at + _HEADER.size + _CHECKSUM.size + len(text), _PAGE)
    header = _HEADER.pack(_MAGIC, FORMAT, len(text), weights_at + payload)
    try:
        _check_replaceable(path)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(code)
                file.seek(header_at)
                file.write(header + _CHECKSUM.pack(checksum(header + text)) + text)
                file.seek(weights_at)
                for piece in _pieces(table, weights):
                    file.write(piece)
                file.truncate(weights_at + payload)
                os.fchmod(file.fileno(), 0o777 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ArtifactError(f"{path} must be writable, but {error.strerror or error}; give another path") from error


def _check_replaceable(path: Path) -> None:
    """A device or a pipe would be gone afterwards."""
    if path.exists() and not path.is_file():
        raise OSError("it is a folder, a device or a pipe")


def _pieces(table: Sequence[dict[str, Any]], weights: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    """The weights and the zeros between them."""
    end = 0
    for entry, array in zip(table, weights, strict=True):
        yield bytes(entry["offset"] - end)
        yield array.reshape(-1).view(np.uint8).data
        end = entry["offset"] + entry["bytes"]


def _stored(
    entries: Sequence[dict[str, Any]], weights: Sequence[np.ndarray]
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """The table with the type that each weight is stored as, and the bytes to store."""
    flat = [array.reshape(-1).view(np.uint8) for array in weights]
    table = [{**entry, "stored": stored_type(entry["dtype"], data)} for entry, data in zip(entries, flat, strict=True)]
    return table, [
        data if entry["stored"] == entry["dtype"] else narrowed(data, entry["stored"])
        for entry, data in zip(table, flat, strict=True)
    ]


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


def read(path: str | os.PathLike[str], verify: bool = True) -> Artifact:
    """Read an artifact, every byte of it into memory of this process, and compare all with their checksums.

    ``verify=False`` does so with code and metadata alone, and maps the weights from the file: then nothing of them is
    read before it is used, several processes share them, and the file must not be written to while they are in use.
    That is for weights that are stored as they are used; others are read and widened.

    Raises :class:`ArtifactError` for a file that is missing, no artifact, cut short, damaged, or of another format.
    """
    path = Path(path)
    try:
        with open(path, "rb", buffering=0, opener=_open) as file:
            return _read(path, file, verify)
    except FileNotFoundError:
        raise ArtifactError(f"the compiled model must exist, but {path} does not; make it with `mlc compile`") from None
    except (OSError, ValueError, MemoryError) as error:  # a path with a NUL byte is a ValueError
        why = getattr(error, "strerror", None) or str(error) or "there is not enough memory for it"
        raise ArtifactError(f"the compiled model must be readable, but {path} is not: {why}") from error


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe that nobody writes to would be waited for


def _read(path: Path, file: IO[bytes], verify: bool) -> Artifact:
    number, status = file.fileno(), os.fstat(file.fileno())
    code_bytes = _elf_bytes(os.pread(number, 64, 0)) if stat.S_ISREG(status.st_mode) else None
    if code_bytes is None:
        raise ArtifactError(f"a compiled model must be a file that `mlc compile` wrote, but {path} is none")
    if code_bytes > status.st_size:
        raise _wrong_size(path, status.st_size, code_bytes)
    header_at = _aligned(code_bytes, _PAGE)
    text, total = _text(path, number, header_at, status.st_size)
    text_end = header_at + _HEADER.size + _CHECKSUM.size + len(text)
    weights_at = _aligned(text_end, _PAGE)
    metadata, expected = _described(path, text, header_at, total - weights_at)
    if any(os.pread(number, weights_at - text_end, text_end)):
        raise _damaged(path, "padding", text_end)
    code = _checked(path, number, "code", 0, np.empty(header_at, np.uint8), expected)
    if verify:
        weights = _checked(path, number, "weights", weights_at, room(total - weights_at), expected)
    else:
        weights = _mapped(file, weights_at, total - weights_at)
    each = [_as_used(entry, weights) for entry in metadata["weights"]]
    return Artifact(path, code[:code_bytes].tobytes(), metadata, each, weights_at)


def _as_used(entry: dict[str, Any], weights: np.ndarray) -> np.ndarray:
    """The bytes of one weight, as the type that the program reads."""
    data = weights[entry["offset"] : entry["offset"] + entry["bytes"]]
    return data if entry["stored"] == entry["dtype"] else widened(data, entry["stored"])


def _elf_bytes(head: bytes) -> int | None:
    """Where a 64-bit ELF file ends: after its section headers, which linkers write last. None for other files."""
    if len(head) < 64 or head[:4] != _ELF or head[4] != 2:
        return None
    order = "<" if head[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", head, 0x28)
    entry, count = struct.unpack_from(f"{order}HH", head, 0x3A)
    return int(offset + entry * count)


def _text(path: Path, file: int, at: int, size: int) -> tuple[bytes, int]:
    """The metadata as it was written, and how long the whole file must be."""
    header = os.pread(file, _HEADER.size + _CHECKSUM.size, at)
    if header[: len(_MAGIC)] != _MAGIC[: len(header)] or not header:
        raise ArtifactError(f"{path} is a shared library, but holds no compiled model (or was stripped of it); "
                            "make one with `mlc compile`")
    if len(header) < _HEADER.size + _CHECKSUM.size:
        raise _wrong_size(path, size, at + _HEADER.size + _CHECKSUM.size)
    _, version, text_bytes, total = _HEADER.unpack_from(header)
    if version != FORMAT:
        raise ArtifactError(f"{path} has format {version}, but this mlc reads format {FORMAT}; compile the model again")
    if text_bytes <= min(description.MOST_BYTES, size - at - len(header)):
        text = os.pread(file, text_bytes, at + len(header))
        if _CHECKSUM.unpack_from(header, _HEADER.size) == (checksum(header[: _HEADER.size] + text),):
            if size != total:
                raise _wrong_size(path, size, total)
            return text, total
    elif size < total:
        raise _wrong_size(path, size, total)
    raise _damaged(path, "metadata", at)


def _described(path: Path, text: bytes, code_room: int, payload: int) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The metadata, and the checksums of code and weights."""
    try:
        found = description.parsed(text)
        wanted = description.payload_bytes(found.get("weights"))
        if wanted != payload:
            raise ValueError(f"weights must take {wanted} bytes, got {payload}")
        chunks = {"code": -(-code_room // CHUNK), "weights": -(-payload // CHUNK)}
        return found, description.checked_sums(found.pop(_SUMS, None), chunks)
    except ValueError as error:
        raise nonsense(path, error) from error


def _checked(
    path: Path, file: int, part: str, start: int, into: np.ndarray, expected: dict[str, list[int]]
) -> np.ndarray:
    """``into``, filled from the file."""
    bad = read_checked(file, start, into, expected[part])
    if bad is not None:
        raise _damaged(path, part, bad)
    return into


def _mapped(file: IO[bytes], start: int, size: int) -> np.ndarray:
    """Bytes of the file as memory that may be written to (as DLPack wants) without changing the file."""
    return np.memmap(file, np.uint8, "c", start, (size,)) if size else np.empty(0, np.uint8)


def nonsense(path: Path, error: ValueError) -> ArtifactError:
    """Metadata that has its checksum and still cannot be what the compiler wrote."""
    return ArtifactError(f"the metadata in {path} must describe a compiled model: {error}; compile the model again")


def _wrong_size(path: Path, size: int, wanted: int) -> ArtifactError:
    if size > wanted:
        return ArtifactError(f"{path} must have {wanted} bytes, but has {size}: something was written after its end; "
                             "copy it again")
    return ArtifactError(f"{path} is cut short: it must have at least {wanted} bytes, but has {size}; copy it again")


def _damaged(path: Path, part: str, at: int) -> ArtifactError:
    return ArtifactError(f"the {part} in {path} must match its checksum, but is damaged at byte {at} or after it; "
                         "copy the file again, or compile the model again")
