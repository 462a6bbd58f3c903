"""Human-readable numbers: three significant digits and a unit."""

from __future__ import annotations

import math

__all__ = ["bytes_", "duration", "factor", "flops", "rate", "seconds"]


def seconds(value: float | None) -> str:
    """A latency: ``512 µs``, ``5.10 ms``; a dash for None, infinity or NaN."""
    if value is None or not math.isfinite(value):
        return "-"
    for limit, unit, scale in ((1e-6, "ns", 1e9), (1e-3, "µs", 1e6), (1.0, "ms", 1e3)):
        if value < limit:
            return f"{_three(value * scale)} {unit}"
    return f"{_three(value)} s"


def duration(value: float | None) -> str:
    """A span of waiting: ``0:07``, ``12:40``, ``1:02:03``; a dash for None, infinity or NaN."""
    if value is None or not math.isfinite(value):
        return "-"
    whole = max(0, round(value))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def factor(value: float | None) -> str:
    """A ratio: ``1.27×``; a dash for None, infinity or NaN."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}×"


def flops(value: float) -> str:
    """A count of floating-point operations: ``818 MFLOP``."""
    return _scaled(value, "FLOP")


def rate(operations: float, time: float) -> str:
    """Operations a second, ``152 GFLOP/s``; a dash where either is unknown."""
    if not operations or not time or not math.isfinite(time):
        return "-"
    return _scaled(operations / time, "FLOP/s")


def bytes_(value: float) -> str:
    """A size in powers of ten: ``4.95 MB``."""
    return _scaled(value, "B")


def _scaled(value: float, unit: str) -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_three(value / scale)} {prefix}{unit}"
    return f"{_three(value)} {unit}"


def _three(value: float) -> str:
    """Three significant digits without an exponent."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
