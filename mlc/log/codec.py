"""Records as text and back. Nothing that is read is executed, and values of a wrong type are rejected."""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from mlc.errors import LogError
from mlc.log.record import Record, Verdict

__all__ = ["MalformedRecord", "canonical_text", "digest", "pack", "parse_text", "unpack", "versions_of"]

_MAX_TEXT = 64 * 1024 * 1024  # bytes of one unpacked record; a larger one is an attack or damage
_TEXTS = ("task_key", "task_name", "space", "trace", "failure", "detail", "machine", "versions", "session")
#: texts that reach a terminal as they are: one line without control characters
_NAMES = ("task_key", "task_name", "space", "machine", "versions", "session")
_MAX_NAME = 1024
_COUNTS = ("seed", "trial")
_NUMBERS = ("build_seconds", "when", "flops")
_REQUIRED = ("task_key", "task_name", "space", "trace", "decisions")
_DEFAULTS: dict[str, Any] = {
    **{f.name: f.default for f in fields(Record) if f.default is not MISSING}, "times": [], "extra": {},
}
#: texts of a stored ``extra`` that are fields of a record: the name there, the field, to text and back
_NAMED: tuple[tuple[str, str, Callable[[Any], str], Callable[[str], Any]], ...] = (
    ("code", "code", str, str),
    ("device", "device", str, str),
    ("expected", "expected", "{:.6e}".format, float),
    ("shipped", "made_for", str, str),
    ("slowness", "slowness", "{:.2f}".format, float),
    ("verdict", "verdict", lambda verdict: str(verdict.value), Verdict),
)
_STORED = tuple(f.name for f in fields(Record) if f.name not in {field for _, field, _, _ in _NAMED})
_FAILURES = frozenset(("", "build", "run", "timeout", "crash", "wrong"))


class MalformedRecord(LogError):
    """Text that is not a record; the message says which field is wrong."""


def canonical_text(record: Record) -> str:
    """The record as JSON with a fixed order and spelling, so that equal records are equal texts.

    Fields at their default are left out: a field that a later version adds does not change the old digests.
    Raises :class:`MalformedRecord` for a record that could not be read back.
    """
    values = {name: getattr(record, name) for name in _STORED}
    for name in (*_COUNTS, *_NUMBERS):
        values[name] = _plain(values[name])
    values["times"] = [_plain(t) for t in record.times]
    values["decisions"] = {k: _plain(v) for k, v in record.decisions.items()}
    values["extra"] = _with_named(record)
    values = _checked(values)
    return _dump({name: value for name, value in values.items() if name in _REQUIRED or value != _DEFAULTS[name]})


def parse_text(text: str) -> Record:
    """Inverse of :func:`canonical_text`; raises :class:`MalformedRecord`."""
    try:
        values = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedRecord(f"a record must be JSON, got {text[:40]!r} ({error})") from None
    if not isinstance(values, dict):
        raise MalformedRecord(f"a record must be a JSON object, got {type(values).__name__}")
    unknown = sorted(values.keys() - set(_STORED))
    if unknown:
        raise MalformedRecord(f"a record has only the fields that this mlc knows, got {', '.join(unknown[:4])}")
    values = _checked(values)
    values["times"] = tuple(values.get("times", ()))
    return Record(**values, **_named_of(values.get("extra", {})))


def _with_named(record: Record) -> dict[str, str]:
    """Move fields that are stored under ``extra``, but have a name, to that name."""
    extra = dict(record.extra)
    for name, field, written, _ in _NAMED:
        if name in extra:
            raise MalformedRecord(f"extra must hold what has no field of its own, got {name}; set {field}")
        if value := getattr(record, field):
            extra[name] = written(value)
    return extra


def _named_of(extra: dict[str, str]) -> dict[str, Any]:
    """The fields that a stored ``extra`` holds, taken out of it."""
    found: dict[str, Any] = {}
    for name, field, written, read in _NAMED:
        if name in extra:
            text = extra.pop(name)
            try:
                found[field] = read(text)
                exact = bool(text) and written(found[field]) == text
            except ValueError:
                exact = False
            if not exact:  # it could not be written as it was
                raise MalformedRecord(f"{name} must be written as mlc writes it, got {text[:40]!r}")
    return found


def digest(text: str) -> bytes:
    """16 bytes that identify a fact: records that agree in every field are the same fact."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def pack(text: str) -> bytes:
    """Compressed canonical text, as the database keeps it (traces shrink about sixfold)."""
    return zlib.compress(text.encode(), 4)


def unpack(blob: bytes) -> str:
    """Inverse of :func:`pack`; raises :class:`MalformedRecord` for damage and for anything over 64 MiB."""
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(blob, _MAX_TEXT)
        if not inflate.eof:
            raise MalformedRecord("a stored record must be complete and under 64 MiB, got a cut or larger one")
        return data.decode()
    except (zlib.error, UnicodeDecodeError, TypeError) as error:
        raise MalformedRecord(f"a stored record must decompress to text, but {error}") from None


def versions_of(task_key: str) -> str:
    """The versions part of a task key, ``tvm<..>-llvm<..>``, or the empty text where it has none."""
    match = re.search(r"-(tvm[^/]*-llvm[^-/]*)$", task_key)
    return match[1] if match else ""


def _dump(values: Any) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a record may hold")


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's, everything else as it is."""
    return value.item() if hasattr(value, "item") else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _number(name: str, value: Any) -> float:
    number = _float(value)
    if number is None or not math.isfinite(number):
        raise MalformedRecord(f"{name} must be a finite number, got {str(value)[:40]!r}")
    return number


def _float(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with every field of its type, numbers in one spelling."""
    out = dict(values)
    for name in _REQUIRED:
        if name not in values:
            raise MalformedRecord(f"a record must have {name}, got {', '.join(sorted(values)) or 'nothing'}")
    if not values["task_key"]:
        raise MalformedRecord("task_key must not be empty")
    for name in _TEXTS:
        if not isinstance(values.get(name, ""), str):
            raise MalformedRecord(f"{name} must be text, got {type(values[name]).__name__}")
        if not _is_encodable(values.get(name, "")):
            raise MalformedRecord(f"{name} must be text that UTF-8 can say, got a lone surrogate")
    for name in _NAMES:
        text = values.get(name, "")
        if not text.isprintable() or len(text) > _MAX_NAME:
            raise MalformedRecord(f"{name} must be one line of at most {_MAX_NAME} characters, got {text[:40]!r}")
    for name in _COUNTS:
        if not _is_count(values.get(name, 0)):
            raise MalformedRecord(f"{name} must be a whole number, got {values[name]!r}")
    for name in _NUMBERS:
        if name in values:
            out[name] = _number(name, values[name])
    times = values.get("times", [])
    if not isinstance(times, (list, tuple)):
        raise MalformedRecord(f"times must be a list, got {type(times).__name__}")
    out["times"] = [_number("times", t) for t in times]
    if any(t <= 0 for t in out["times"]):
        raise MalformedRecord(f"times must be positive seconds, got {times!r}")
    if values.get("failure", "") not in _FAILURES:
        known = ", ".join(sorted(_FAILURES - {""}))
        raise MalformedRecord(f"failure must be one of {known}, got {values['failure'][:40]!r}")
    if not _is_mapping(values["decisions"], _is_count):
        raise MalformedRecord(f"decisions must map names to whole numbers, got {str(values['decisions'])[:80]!r}")
    if not _is_mapping(values.get("extra", {}), lambda v: isinstance(v, str) and _is_encodable(v)):
        raise MalformedRecord(f"extra must map names to texts, got {str(values['extra'])[:80]!r}")
    return out


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_mapping(value: Any, accepts: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(k, str) and k.isprintable() and accepts(v) for k, v in value.items()
    )
