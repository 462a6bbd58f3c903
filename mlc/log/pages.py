"""Recovers the rows of a damaged SQLite file page by page.

SQLite stops at the first page that is wrong, and needs the first page to find any other. A table's leaf pages
hold whole rows, though, so every leaf that survived gives its rows whatever happened to the rest. What is
returned is a guess at the bytes: the caller verifies it. Layout: https://www.sqlite.org/fileformat2.html
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["raw_rows"]

Value = None | int | float | str | bytes

_TABLE_LEAF = 0x0D
_WAL_HEADER, _FRAME_HEADER = 32, 24
_MAX_PAYLOAD = 64 * 1024 * 1024


class _Torn(Exception):
    """Raised for bytes that are not a row."""


def raw_rows(path: Path, page_size: int) -> Iterator[tuple[Value, ...]]:
    """Every row of every table leaf in the file and in its write-ahead log; empty where there are none."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            pages = _Pages(data, _wal_pages(path.with_name(path.name + "-wal"), page_size), page_size)
            for number in pages.numbers():
                yield from _leaf_rows(pages, number)


class _Pages:
    """Page numbers start at 1; a page in the write-ahead log is newer than the one in the file."""

    def __init__(self, data: mmap.mmap, newer: dict[int, bytes], size: int) -> None:
        self._data, self._newer, self.size = data, newer, size

    def numbers(self) -> list[int]:
        return sorted({*range(1, len(self._data) // self.size + 2), *self._newer})

    def __getitem__(self, number: int) -> bytes:
        if number in self._newer:
            return self._newer[number]
        start = (number - 1) * self.size
        return self._data[start : start + self.size]  # short or empty at a torn end


def _wal_pages(path: Path, page_size: int) -> dict[int, bytes]:
    """The last image of each page in the write-ahead log; frames of an earlier use of it are left out."""
    try:
        wal = path.read_bytes()
    except OSError:
        return {}
    pages, salt = {}, wal[16:24]
    for at in range(_WAL_HEADER, len(wal) - _FRAME_HEADER - page_size + 1, _FRAME_HEADER + page_size):
        if wal[at + 8 : at + 16] != salt:
            break
        (number,) = struct.unpack_from(">I", wal, at)
        pages[number] = wal[at + _FRAME_HEADER : at + _FRAME_HEADER + page_size]
    return pages


def _leaf_rows(pages: _Pages, number: int) -> Iterator[tuple[Value, ...]]:
    page = pages[number]
    start = 100 if number == 1 else 0
    if len(page) < start + 8 or page[start] != _TABLE_LEAF:
        return
    (cells,) = struct.unpack_from(">H", page, start + 3)
    for index in range(min(cells, (len(page) - start - 8) // 2)):
        (offset,) = struct.unpack_from(">H", page, start + 8 + 2 * index)
        try:
            yield _row(_payload(pages, page, offset))
        except (_Torn, IndexError, struct.error, UnicodeDecodeError):
            continue


def _payload(pages: _Pages, page: bytes, offset: int) -> bytes:
    """A cell's bytes, with those that went to overflow pages."""
    length, at = _varint(page, offset)
    _, at = _varint(page, at)  # the row's number
    if not 0 < length <= _MAX_PAYLOAD:
        raise _Torn
    size = pages.size
    if length <= size - 35:
        return _exactly(page[at : at + length], length)
    least = (size - 12) * 32 // 255 - 23
    local = least + (length - least) % (size - 4)
    local = local if local <= size - 35 else least
    parts = [page[at : at + local]]
    (following,) = struct.unpack_from(">I", page, at + local)
    missing = length - local
    while missing > 0:
        overflow = pages[following] if following else b""
        if len(overflow) < size:
            raise _Torn
        parts.append(overflow[4 : 4 + missing])
        missing -= len(parts[-1])
        (following,) = struct.unpack_from(">I", overflow)
    return _exactly(b"".join(parts), length)


def _row(payload: bytes) -> tuple[Value, ...]:
    end, at = _varint(payload, 0)
    kinds = []
    while at < end:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    values = []
    for kind in kinds:
        value, at = _value(payload, at, kind)
        values.append(value)
    return tuple(values)


def _value(payload: bytes, at: int, kind: int) -> tuple[Value, int]:
    if kind == 0:
        return None, at
    if kind in (8, 9):
        return kind - 8, at
    if kind == 7:
        return struct.unpack_from(">d", payload, at)[0], at + 8
    if kind < 7:
        width = (0, 1, 2, 3, 4, 6, 8)[kind]
        return int.from_bytes(_exactly(payload[at : at + width], width), "big", signed=True), at + width
    if kind < 12:
        raise _Torn
    width = (kind - 12) // 2
    data = _exactly(payload[at : at + width], width)
    return (data.decode() if kind % 2 else data), at + width


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise _Torn
    return data


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count in range(9):
        byte = data[at + count]
        if count == 8:
            return (value << 8) | byte, at + 9
        value = (value << 7) | (byte & 0x7F)
        if byte < 0x80:
            return value, at + count + 1
    raise AssertionError("unreachable")
