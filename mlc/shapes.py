"""Free (dynamic) dimensions and their ranges, and the notation for both.

A shape is written ``1..32,3,224,224``; in Python also ``((1, 32), 3, 224, 224)`` or with :class:`Range` and text for
single sizes. A static size is a range of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlc.errors import UsageError

__all__ = [
    "DEFAULT_RANGE", "Free", "Linear", "Range", "Shape", "from_json", "is_free", "parse_shape", "parse_shapes",
    "shape_text", "to_json", "usual",
]

_TEXT = re.compile(r"\s*(-?\d+)\s*(?:\.\.\s*(-?\d+)\s*)?")
_LARGEST = 2**31 - 1


@dataclass(frozen=True, order=True)
class Range:
    """The sizes from ``low`` to ``high``, both included; ``0 <= low <= high < 2**31`` (:class:`UsageError` else).

    What a caller says (:meth:`of`) begins at 1; 0 is for what a model remembers before its first call.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= _LARGEST:
            raise _no_range(self.low, self.high)

    @classmethod
    def of(cls, value: Any) -> Range:
        """From a number, ``(low, high)``, ``"low..high"``, or a range; raises :class:`UsageError` for anything else."""
        if isinstance(value, Range):
            return value
        if isinstance(value, str):
            found = _TEXT.fullmatch(value)
            if found:
                return cls._from_one(int(found[1]), int(found[2] or found[1]))
        elif isinstance(value, Sequence) and len(value) == 2:
            return cls._from_one(_whole(value[0]), _whole(value[1]))
        elif hasattr(value, "__index__"):
            return cls._from_one(_whole(value), _whole(value))
        raise UsageError(f"a size must be a number or a range such as 1..32, got {value!r}")

    @classmethod
    def _from_one(cls, low: int, high: int) -> Range:
        if low < 1:
            raise _no_range(low, high)
        return cls(low, high)

    @property
    def fixed(self) -> bool:
        """Whether it holds one size only."""
        return self.low == self.high

    @property
    def middle(self) -> int:
        """What decisions are taken for where nothing says which sizes are usual: the power of two next to the
        geometric mean of both ends, or the mean where there is no such power between them; of what may be nothing, a
        quarter of the most to half of it."""
        if not self.low:
            return 1 << max(self.high.bit_length() - 2, 0)
        product = self.low * self.high
        power = 1 << math.floor(math.log2(product) / 2 + 0.5)
        return power if self.low <= power <= self.high else math.isqrt(product)

    def __contains__(self, size: int) -> bool:
        return self.low <= size <= self.high

    def __str__(self) -> str:
        return str(self.low) if self.fixed else f"{self.low}..{self.high}"


def _no_range(low: int, high: int) -> UsageError:
    most = f" <= {_LARGEST}" if high > _LARGEST else ""
    return UsageError(f"a range of sizes must be LOW..HIGH with 1 <= LOW <= HIGH{most}, got {low}..{high}")


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"a size must be a whole number, got {value!r}")
    return int(value.__index__())


#: of a free dimension that nothing was said about
DEFAULT_RANGE = Range(1, 512)


@dataclass(frozen=True)
class Linear:
    """A size that follows from free ones: ``2 * batch + past + 1``. ``terms`` are names and their factors."""

    terms: tuple[tuple[str, int], ...]
    constant: int = 0

    @classmethod
    def parse(cls, text: str) -> Linear | None:
        """From text as exporters and TVM write it; None where it is anything else, or no more than one name.

        >>> Linear.parse("2*s77 + 1"), Linear.parse("batch")
        (Linear(terms=(('s77', 2),), constant=1), None)
        """
        terms: dict[str, int] = {}
        constant = 0
        for word in text.replace(" - ", " + -").split("+"):
            factor, names = 1, []
            for part in map(str.strip, word.split("*")):
                negative, part = part.startswith("-"), part.removeprefix("-").strip()
                if part.isdecimal():
                    factor *= int(part)
                elif part and not set(part) & set("()/% "):
                    names.append(part)
                else:
                    return None
                factor = -factor if negative else factor
            if len(names) > 1:
                return None
            if names:
                terms[names[0]] = terms.get(names[0], 0) + factor
            else:
                constant += factor
        found = cls(tuple((name, factor) for name, factor in terms.items() if factor), constant)
        plain = found.terms == ((text.strip(), 1),) and not constant
        return found if found.terms and not plain else None

    def replaced(self, name: str, other: Linear) -> Linear:
        """With what ``other`` comes to instead of the size ``name``.

        >>> str(Linear((("past", 1), ("new", 2)), 1).replaced("new", Linear((), 3)))
        'past + 7'
        """
        terms, factor = dict(self.terms), dict(self.terms).get(name, 0)
        terms.pop(name, None)
        for term, times in other.terms if factor else ():
            terms[term] = terms.get(term, 0) + factor * times
        return Linear(tuple((term, times) for term, times in terms.items() if times),
                      self.constant + factor * other.constant)

    def of(self, sizes: Mapping[str, int]) -> int:
        """The size where the free ones are ``sizes``."""
        return sum(factor * sizes[name] for name, factor in self.terms) + self.constant

    def within(self, ranges: Mapping[str, Range]) -> tuple[int, int]:
        """The least and the largest it may be."""
        ends = [sorted((f * ranges[name].low, f * ranges[name].high)) for name, f in self.terms]
        return sum(low for low, _ in ends) + self.constant, sum(high for _, high in ends) + self.constant

    def __str__(self) -> str:
        words = [name if factor == 1 else f"{factor}*{name}" for name, factor in self.terms]
        return " + ".join([*words, *([str(self.constant)] if self.constant or not words else [])])


#: an input's shape as a user gives it
Shape = str | Sequence[Any]


@dataclass(frozen=True)
class Free:
    """A size that a call decides. Equal names are equal sizes; that of an output may be an expression: ``2 * batch``.

    ``usual`` is the size that decisions are taken for.
    """

    name: str
    range: Range
    usual: int

    def __str__(self) -> str:
        return f"{self.name}={self.range}"


def to_json(shape: Iterable[int | Free]) -> list[Any]:
    """Sizes as JSON values: numbers, and objects for free ones."""
    return [
        {"name": s.name, "low": s.range.low, "high": s.range.high, "usual": s.usual} if isinstance(s, Free) else s
        for s in shape
    ]


def from_json(shape: Iterable[Any]) -> tuple[int | Free, ...]:
    """Inverse of :func:`to_json`."""
    return tuple(
        Free(s["name"], Range(s["low"], s["high"]), s["usual"]) if isinstance(s, dict) else int(s) for s in shape
    )


def is_free(shape: Iterable[int | Free]) -> bool:
    """Whether a call decides some of the sizes."""
    return any(isinstance(size, Free) for size in shape)


def usual(shape: Iterable[int | Free], sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
    """The shape with free sizes as ``sizes`` says by name, or the usual ones."""
    given = sizes or {}

    def size(free: Free) -> int:
        linear = None if free.name in given or not given else Linear.parse(free.name)
        known = linear is not None and all(name in given for name, _ in linear.terms)
        return linear.of(given) if linear is not None and known else given.get(free.name, free.usual)

    return tuple(size(s) if isinstance(s, Free) else s for s in shape)


def parse_shape(shape: Shape) -> tuple[Range, ...]:
    """One range for each axis; raises :class:`UsageError`."""
    if isinstance(shape, str):
        shape = shape.split(",") if shape.strip() else ()
    if not isinstance(shape, Iterable):
        raise UsageError(f"a shape must be sizes such as (1, 3) or '1..32,3', got {shape!r}")
    return tuple(Range.of(size) for size in shape)


def parse_shapes(words: Iterable[str]) -> dict[str, tuple[Range, ...]]:
    """Parse ``--shape NAME=1..32,3,224,224``, given once for each input; raises :class:`UsageError`."""
    found: dict[str, tuple[Range, ...]] = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        if not (name and equals):
            raise UsageError(f"--shape must look like NAME=1..32,3,224,224, got {word!r}")
        if name in found:
            raise UsageError(f"each input's shape must be given once, but --shape {name}=... came twice")
        found[name] = parse_shape(text)
    return found


def shape_text(shape: Iterable[Any]) -> str:
    """``1..32,3,224,224``."""
    return ",".join(str(size.range if isinstance(size, Free) else size) for size in shape)
