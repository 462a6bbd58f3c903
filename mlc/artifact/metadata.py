"""Validation of an artifact's metadata, which is untrusted input: its checksum only says that it is as it was written.

Every function here raises ``ValueError`` with what must hold and what came.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from mlc.artifact.compact_weights import NARROW
from mlc.artifact.runtime import ALIGNMENT
from mlc.frontend.model import ARRAY_TYPES
from mlc.graph.algorithms.filters import BLOCK, FILTER, TRANSFORMED

__all__ = [
    "MOST_BYTES", "check_model", "check_variants", "checked_sums", "encoded", "parsed", "payload_bytes", "variants",
]

#: no model comes near; text within both is read in about a second, whatever is in it
MOST_BYTES = 8 << 20
_MOST_LISTS = 1 << 18
_MOST_ELEMENTS = 1 << 48
_MOST_DIMENSIONS = 64
#: of free sizes, and of axes of which a call says how many there are
_MOST_PLACES = (1 << 31) - 1
#: names of element types; the number is the bits of one
_DTYPE = re.compile(r"(?:u?int|b?float)(\d{1,3})(?:_[a-z0-9_]{1,16})?")
_LONGEST_WORD = 4096
_MOST_VARIANTS = 64
#: where inputs begin, a multiple of so many bytes: what C libraries give; without a word of it, what compiled code does
_LEAST_ALIGNMENT = 16

Check = Callable[[Any, str], None]


def encoded(metadata: Mapping[str, Any]) -> bytes:
    """Metadata as text for :func:`parsed`."""
    text = json.dumps(metadata, separators=(",", ":"), allow_nan=False).encode()
    _must(len(text) <= MOST_BYTES, "its text", f"at most {MOST_BYTES} bytes long", len(text))
    parsed(text)
    return text


def parsed(text: bytes) -> dict[str, Any]:
    """A JSON object of finite numbers, without two values under one name."""
    lists = text.count(b"[") + text.count(b"{")
    _must(lists <= _MOST_LISTS, "its text", f"of at most {_MOST_LISTS} lists and objects", lists)
    try:
        found = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("its text must be JSON, got lists in lists too deep to read") from None
    _must(isinstance(found, dict), "its text", "a JSON object", found)
    return dict(found)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("each name must have one value, got one twice in an object")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"numbers must be finite, got {name}")


def payload_bytes(table: Any) -> int:
    """The bytes of all weights, one after the other as the writer lays them out.

    There is one layout for given shapes and types, so that no crafted table makes weights overlap or swap places.
    """
    _list_of(_WEIGHT)(table, "weights")
    end = 0
    for i, entry in enumerate(table):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        kinds = (entry["dtype"], *(NARROW if entry["dtype"] == "float32" else ()))
        _must(entry["stored"] in kinds, f"weights[{i}].stored", f"one of {', '.join(kinds)}", entry["stored"])
        if "made" in entry:
            _filters(entry, f"weights[{i}]")
        size = math.prod(entry["shape"]) * _item_bytes(entry["stored"])
        _must(entry["offset"] == start, f"weights[{i}].offset", str(start), entry["offset"])
        _must(entry["bytes"] == size, f"weights[{i}].bytes", str(size), entry["bytes"])
        end = start + size
    return end


def _filters(entry: Mapping[str, Any], place: str) -> None:
    """Whole blocks of channels, so that what is made of them takes a few times their bytes, whoever wrote this."""
    _one_of(*TRANSFORMED)(entry["made"], f"{place}.made")
    shape = entry["shape"]
    whole = len(shape) == 4 and shape[2:] == [FILTER, FILTER] and not any(size % BLOCK for size in shape[:2])
    _must(whole and entry["dtype"] == "float32", place, "float32 filters of whole blocks", shape)


def _length(entry: Mapping[str, Any], place: str, outputs: Sequence[Mapping[str, Any]]) -> None:
    """The axis of which a call says how many there are, and the name of the output that says it."""
    length = entry["length"]
    _must(isinstance(length, list) and len(length) == 2, place, "an axis and an output", length)
    _whole(0, len(entry["shape"]) - 1)(length[0], place)
    size = entry["shape"][length[0]]
    _whole(0, _MOST_PLACES)(size["high"] if isinstance(size, dict) else size, f"the size that {place} is of")
    counts = any(each["name"] == length[1] and each["shape"] == [1] and each["dtype"] == "int64" and
                 "length" not in each for each in outputs)
    _must(counts, place, "an output of one int64", length[1])


def _item_bytes(dtype: str) -> int:
    found = _DTYPE.fullmatch(dtype)
    return 1 if found is None else (int(found[1]) + 7) // 8  # none for bool


def check_model(metadata: Mapping[str, Any]) -> None:
    """Check the metadata of a compiled model, except for its weights."""
    _MODEL(metadata, "")
    _list_of(_text)(metadata.get("states", []), "states")
    _list_of(_whole(0, _MOST_PLACES))(metadata.get("stop", []), "stop")
    _whole(0, _MOST_PLACES)(metadata.get("turn", 0), "turn")
    starts = metadata.get("alignment", ALIGNMENT)
    _must(type(starts) is int and starts in (_LEAST_ALIGNMENT, ALIGNMENT), "alignment",
          f"{_LEAST_ALIGNMENT} or {ALIGNMENT}", starts)
    for side in ("inputs", "outputs"):
        names = [entry["name"] for entry in metadata[side]]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        _must(twice is None, f"names of {side}", "distinct", twice)
    for i, entry in enumerate(metadata["outputs"]):
        if "length" in entry:
            _length(entry, f"outputs[{i}].length", metadata["outputs"])
    attrs = metadata["target_attrs"]
    try:
        place = json.loads(attrs)
    except (ValueError, RecursionError):
        place = None
    fits = isinstance(place, dict) and place.get("kind") == metadata["kind"]
    _must(fits and metadata["target"].startswith(metadata["kind"]), "target_attrs", f"of {metadata['kind']}", attrs)
    if metadata["kind"] == "cuda":
        _word(place.get("arch"), "target_attrs.arch")


def variants(
    metadata: Mapping[str, Any], weights: int, code_bytes: int
) -> tuple[list[dict[str, Any]], list[int], list[Sequence[int]]]:
    """The variants of a bundle, the bytes of each one's library, of which the first has ``code_bytes``, and which of
    so many ``weights`` each uses."""
    _list_of(_fields({"code": _whole(1, 1 << 40), "weights": _list_of(_whole(0, weights - 1))}))(
        metadata.get("variants"), "variants")
    found = [dict(variant) for variant in metadata["variants"]]
    _must(1 <= len(found) <= _MOST_VARIANTS, "variants", f"1 to {_MOST_VARIANTS}", len(found))
    codes, used = [variant.pop("code") for variant in found], [variant.pop("weights") for variant in found]
    _must(codes[0] == code_bytes, "variants[0].code", str(code_bytes), codes[0])
    return found, codes, used


def check_variants(metadata: Sequence[Mapping[str, Any]]) -> None:
    """Check the metadata of each variant of a model, and that they are variants of the same model."""
    first = None
    for each in metadata:
        check_model(each)
        border = {side: [{name: entry.get(name) for name in (*_TENSOR, "length")} for entry in each[side]]
                  for side in ("inputs", "outputs")}
        _must(first is None or border == first, "inputs and outputs", "alike for all targets", each["target"])
        first = border
    targets = [each["target"] for each in metadata]
    _must(len(set(targets)) == len(targets), "targets", "distinct", targets)


def checked_sums(value: Any, chunks: Mapping[str, int]) -> dict[str, list[int]]:
    """The checksums of the chunks of each part of the file, which has as many of them as ``chunks`` says."""
    _fields(dict.fromkeys(chunks, _SUMS))(value, "checksums")
    for name, count in chunks.items():
        _must(len(value[name]) == count, f"checksums.{name}", f"{count} of them", len(value[name]))
    return dict(value)


def _must(holds: bool, place: str, what: str, got: Any) -> None:
    if not holds:
        raise ValueError(f"{place or 'it'} must be {what}, got {reprlib.repr(got)}")


def _any_text(value: Any, place: str) -> None:
    _must(isinstance(value, str), place, "text", value)


def _text(value: Any, place: str) -> None:
    """Any text that can be written down; a lone surrogate cannot."""
    _must(isinstance(value, str) and not re.search("[\ud800-\udfff]", value), place, "text", value)


def _word(value: Any, place: str) -> None:
    """Text that messages show: in one line, and not a page long."""
    fits = isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_WORD
    _must(fits, place, "printable text in one line", value)


def _one_of(*allowed: str) -> Check:
    return lambda value, place: _must(isinstance(value, str) and value in allowed, place,
                                      f"one of {', '.join(sorted(allowed))}", value)


def _whole(least: int, most: int) -> Check:
    return lambda value, place: _must(type(value) is int and least <= value <= most, place,
                                      f"a whole number from {least} to {most}", value)


def _boolean(value: Any, place: str) -> None:
    _must(isinstance(value, bool), place, "true or false", value)


def _number(value: Any, place: str) -> None:
    fits = type(value) in (int, float) and 0 <= value < math.inf
    _must(fits, place, "a finite number, not negative", value)


def _number_or_none(value: Any, place: str) -> None:
    if value is not None:
        _number(value, place)


def _shape(value: Any, place: str) -> None:
    _list_of(_whole(0, _MOST_ELEMENTS))(value, place)
    fits = len(value) <= _MOST_DIMENSIONS and math.prod(value) <= _MOST_ELEMENTS
    _must(fits, place, f"at most {_MOST_DIMENSIONS} sizes, of {_MOST_ELEMENTS} elements", value)


def _border_shape(value: Any, place: str) -> None:
    """Sizes some of which may be free."""
    _must(isinstance(value, list), place, "a list", value)
    for i, size in enumerate(value):
        if isinstance(size, dict):
            _FREE(size, f"{place}[{i}]")
            fits = size["low"] <= size["usual"] <= size["high"]
            _must(fits, f"{place}[{i}]", "a range with its usual size inside", size)
    _shape([size["high"] if isinstance(size, dict) else size for size in value], place)


def _dtype(value: Any, place: str) -> None:
    _must(isinstance(value, str) and (value == "bool" or bool(_DTYPE.fullmatch(value))), place, "a type", value)


def _list_of(check: Check) -> Check:
    def checked(value: Any, place: str) -> None:
        _must(isinstance(value, list), place, "a list", value)
        for i, item in enumerate(value):
            check(item, f"{place}[{i}]")

    return checked


def _map_of(check: Check) -> Check:
    def checked(value: Any, place: str) -> None:
        _must(isinstance(value, dict), place, "an object", value)
        for name, item in value.items():
            _text(name, f"a name in {place}")
            check(item, f"{place}.{reprlib.repr(name)}")

    return checked


def _fields(checks: Mapping[str, Check]) -> Check:
    def checked(value: Any, place: str) -> None:
        _must(isinstance(value, dict), place, "an object", value)
        for name, check in checks.items():
            _must(name in value, place, f"an object with {name}", sorted(value))
            check(value[name], f"{place}.{name}" if place else name)

    return checked


def _versions(value: Any, place: str) -> None:
    _map_of(_word)(value, place)
    _must("tvm" in value, place, "an object with tvm", sorted(value))


def _anything(_value: Any, _place: str) -> None:
    pass


_WEIGHT = _fields({
    "shape": _shape, "dtype": _dtype, "offset": _whole(0, 1 << 62), "bytes": _whole(0, 1 << 62), "stored": _dtype,
})
_SUMS = _list_of(_whole(0, (1 << 64) - 1))
_SIZE = _whole(1, _MOST_PLACES)
_FREE = _fields({"name": _word, "low": _whole(0, _MOST_PLACES), "high": _SIZE, "usual": _SIZE})
_TENSOR: Mapping[str, Check] = {"name": _text, "shape": _border_shape, "dtype": _one_of(*ARRAY_TYPES)}
_FUNCTION = _fields({
    **dict.fromkeys(("name", "symbol", "key", "space", "source"), _text), "calls": _whole(0, 1 << 31),
    "seconds": _number_or_none, "flops": _number, "roofline_seconds": _number, "decisions": _map_of(_anything),
    "tuned": _boolean,
})
_MODEL = _fields({
    "name": _any_text, "inputs": _list_of(_fields(_TENSOR)),
    "outputs": _list_of(_fields({**_TENSOR, "aliased": _boolean})),
    "target": _word, "target_attrs": _text, "kind": _one_of("llvm", "cuda"), "threads": _whole(1, 1 << 16),
    "machine": _word, "features": _list_of(_word), "versions": _versions, "functions": _list_of(_FUNCTION),
})
