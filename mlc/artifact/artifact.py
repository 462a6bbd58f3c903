"""The artifact's file format: code, weights and metadata in one file, written and read back with checksums.

::

    0               a shared library, as the linker wrote it: plain TVM loads the file as a module
    page boundary   header: magic, version, length of the metadata, length of the whole file, checksum of these and
                    of the metadata
                    metadata: JSON, with the checksum of each chunk of the other two parts
    page boundary   weights, each at a multiple of 64 bytes, as the type that the metadata says they are stored as; of
                    filters that the loader transforms ("made") those of the model

A bundle holds code for several targets: other shared libraries, each at a page boundary, stand before the weights. Its
metadata has what a model says of itself for each of these *variants*, and which of the weights each uses; weights that
are equal to the byte are stored once.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from xxhash import xxh3_128_digest

from mlc.artifact import metadata as description
from mlc.artifact.checksum import CHUNK, checksum, read_checked, sums
from mlc.artifact.compact_weights import buffer, buffers, narrowed, stored_type, widened
from mlc.artifact.runtime import ALIGNMENT
from mlc.errors import ArtifactError

__all__ = ["BUNDLE", "FORMAT", "Artifact", "Variant", "nonsense", "read", "write", "write_bundle"]

#: raised when a reader of the version before could not read what is written now
FORMAT = 5
#: the format of a file with several variants
BUNDLE = 6
_MAGIC = b"mlc\x00art\n"
_HEADER = struct.Struct("<8sI4xQQ")  # magic, format, bytes of the metadata, bytes of the file
_CHECKSUM = struct.Struct("<Q")  # of the header and the metadata; between them
_PAGE = 4096
_ELF = b"\x7fELF"
_SUMS = "checksums"


@dataclass(frozen=True)
class Variant:
    """The model for one target: the shared library, the metadata, and each weight as bytes, aligned and writable, in
    the order of ``metadata["weights"]``."""

    code: bytes
    metadata: dict[str, Any]
    weights: list[np.ndarray]


@dataclass(frozen=True)
class Artifact:
    """What :func:`read` found; of most files one variant. ``weights_at`` is where in the file the weights begin, in
    bytes."""

    path: Path
    variants: tuple[Variant, ...]
    weights_at: int

    @property
    def code(self) -> bytes:
        """The shared library that the file begins with."""
        return self.variants[0].code

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata that belong to it."""
        return self.variants[0].metadata

    @property
    def weights(self) -> list[np.ndarray]:
        """Its weights."""
        return self.variants[0].weights


def write(path: Path, code: bytes, metadata: dict[str, Any], weights: Sequence[np.ndarray]) -> None:
    """Write an artifact; it appears under its name when it is complete, in place of what was there.

    ``weights`` are contiguous, in the order of ``metadata["weights"]``; where each is, and as which type it is stored
    (:mod:`mlc.artifact.compact_weights`), is filled in here. A process that has loaded what was there keeps it.
    """
    _write(path, FORMAT, [code], metadata, metadata["weights"], weights)


def write_bundle(path: Path, variants: Sequence[Variant]) -> int:
    """Write variants of one model as one file, as :func:`write` does; the bytes that need not be stored again since
    variants share weights."""
    entries, weights = list[dict[str, Any]](), list[np.ndarray]()
    known: dict[tuple[Any, ...], int] = {}
    described, saved = [], 0
    for variant in variants:
        own = []
        for entry, data in zip(variant.metadata["weights"], variant.weights, strict=True):
            entry = {name: entry[name] for name in ("shape", "dtype", "made") if name in entry}
            content = (entry["dtype"], tuple(entry["shape"]), entry.get("made"), xxh3_128_digest(data.data))
            at = known.setdefault(content, len(entries))
            if at == len(entries):
                entries.append(entry)
                weights.append(data)
            elif np.array_equal(weights[at].view(np.uint8), data.view(np.uint8)):
                saved += data.nbytes
            else:  # made to have an equal hash
                at = len(entries)
                entries.append(entry)
                weights.append(data)
            own.append(at)
        described.append({**variant.metadata, "code": len(variant.code), "weights": own})
    _write(path, BUNDLE, [variant.code for variant in variants], {"variants": described}, entries, weights)
    return saved


def _write(
    path: Path, version: int, codes: Sequence[bytes], metadata: dict[str, Any], entries: Sequence[dict[str, Any]],
    weights: Sequence[np.ndarray],
) -> None:
    entries, weights = _stored(entries, weights)
    table, payload = _layout(entries, weights)
    code, *others = codes
    header_at = _aligned(len(code), _PAGE)
    found = {"code": sums(_padded([code])), "weights": sums(_pieces(table, weights))}
    if version == BUNDLE:
        found["others"] = sums(_padded(others))
    try:
        text = description.encoded({**metadata, "weights": table, _SUMS: found})
    except ValueError as error:
        raise ArtifactError(f"the metadata of {metadata.get('name')} cannot be written: {error}") from error
    others_at = _aligned(header_at + _HEADER.size + _CHECKSUM.size + len(text), _PAGE)
    weights_at = others_at + _room(map(len, others))
    header = _HEADER.pack(_MAGIC, version, len(text), weights_at + payload)
    try:
        _check_replaceable(path)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(code)
                file.seek(header_at)
                file.write(header + _CHECKSUM.pack(checksum(header + text)) + text)
                file.seek(others_at)
                for piece in _padded(others):
                    file.write(piece)
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


def _padded(codes: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    """Shared libraries, each followed by zeros up to a page boundary."""
    for code in codes:
        yield code
        yield bytes(_aligned(len(code), _PAGE) - len(code))


def _room(sizes: Iterable[int]) -> int:
    """The bytes of :func:`_padded` libraries."""
    return sum(_aligned(size, _PAGE) for size in sizes)


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
    text, total, version = _text(path, number, header_at, status.st_size)
    text_end = header_at + _HEADER.size + _CHECKSUM.size + len(text)
    others_at = _aligned(text_end, _PAGE)
    found = _described(path, text, version == BUNDLE, code_bytes, total - others_at)
    expected = found.sums
    weights_at = others_at + _room(found.codes[1:])
    if any(os.pread(number, others_at - text_end, text_end)):
        raise _damaged(path, "padding", text_end)
    code = _checked(path, number, "code", 0, np.empty(header_at, np.uint8), expected)
    others = _checked(path, number, "others", others_at, np.empty(weights_at - others_at, np.uint8), expected)
    if verify:
        weights = _checked(path, number, "weights", weights_at, buffer(total - weights_at), expected)
    else:
        weights = _mapped(file, weights_at, total - weights_at)
    each = _as_used(found.table, weights)
    codes, start = [code[:code_bytes].tobytes()], 0
    for size in found.codes[1:]:
        codes.append(others[start : start + size].tobytes())
        start += _aligned(size, _PAGE)
    return Artifact(path, tuple(
        Variant(own, {**metadata, "weights": [found.table[i] for i in used]}, [each[i] for i in used])
        for own, metadata, used in zip(codes, found.variants, found.used, strict=True)
    ), weights_at)


def _as_used(table: Sequence[dict[str, Any]], weights: np.ndarray) -> list[np.ndarray]:
    """The bytes of each weight, as the type that the program reads."""
    each = [weights[entry["offset"] : entry["offset"] + entry["bytes"]] for entry in table]
    narrow = [i for i, entry in enumerate(table) if entry["stored"] != entry["dtype"]]
    for i, result in zip(narrow, buffers([2 * each[i].size for i in narrow]), strict=True):
        each[i] = widened(each[i], table[i]["stored"], result)
    return each


def _elf_bytes(head: bytes) -> int | None:
    """The size of a 64-bit ELF file: it ends after its section headers, which linkers write last. None for other files.
    """
    if len(head) < 64 or head[:4] != _ELF or head[4] != 2:
        return None
    order = "<" if head[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", head, 0x28)
    entry, count = struct.unpack_from(f"{order}HH", head, 0x3A)
    return int(offset + entry * count)


def _text(path: Path, file: int, at: int, size: int) -> tuple[bytes, int, int]:
    """The metadata as it was written, how long the whole file must be, and its format."""
    header = os.pread(file, _HEADER.size + _CHECKSUM.size, at)
    if header[: len(_MAGIC)] != _MAGIC[: len(header)] or not header:
        raise ArtifactError(f"{path} is a shared library, but holds no compiled model (or was stripped of it); "
                            "make one with `mlc compile`")
    if len(header) < _HEADER.size + _CHECKSUM.size:
        raise _wrong_size(path, size, at + _HEADER.size + _CHECKSUM.size)
    _, version, text_bytes, total = _HEADER.unpack_from(header)
    if version not in (FORMAT, BUNDLE):
        raise ArtifactError(f"{path} has format {version}, but this mlc reads formats {FORMAT} and {BUNDLE}; compile "
                            "the model again")
    if text_bytes <= min(description.MOST_BYTES, size - at - len(header)):
        text = os.pread(file, text_bytes, at + len(header))
        if _CHECKSUM.unpack_from(header, _HEADER.size) == (checksum(header[: _HEADER.size] + text),):
            if size != total:
                raise _wrong_size(path, size, total)
            return text, total, version
    elif size < total:
        raise _wrong_size(path, size, total)
    raise _damaged(path, "metadata", at)


@dataclass(frozen=True)
class _Described:
    """What the metadata say: the bytes of each variant's library, what each says of itself and which entries of the
    weights' ``table`` it uses, and the checksums of each part."""

    codes: list[int]
    variants: list[dict[str, Any]]
    used: list[Sequence[int]]
    table: list[dict[str, Any]]
    sums: dict[str, list[int]]


def _described(path: Path, text: bytes, bundle: bool, code_bytes: int, size: int) -> _Described:
    """``size`` bytes follow the metadata."""
    try:
        found = description.parsed(text)
        wanted, table = description.payload_bytes(found.get("weights")), found.pop("weights")
        variants, codes = [found], [code_bytes]
        used: list[Sequence[int]] = [range(len(table))]
        if bundle:
            variants, codes, used = description.variants(found, len(table), code_bytes)
        payload = size - _room(codes[1:])
        if wanted != payload:
            raise ValueError(f"weights must take {wanted} bytes, got {payload}")
        chunks = {"code": -(-_room([code_bytes]) // CHUNK), "weights": -(-payload // CHUNK)}
        if bundle:
            chunks["others"] = -(-_room(codes[1:]) // CHUNK)
        sums = description.checked_sums(found.pop(_SUMS, None), chunks)
        return _Described(codes, variants, used, table, {"others": [], **sums})
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
