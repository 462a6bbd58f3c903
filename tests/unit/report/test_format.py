"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from mlc.report import format as fmt


@pytest.mark.parametrize(("value", "text"), [
    (3e-9, "3.00 ns"), (512e-6, "512 µs"), (5.0961e-3, "5.10 ms"), (9.9999e-3, "10.0 ms"), (0.0999, "99.9 ms"),
    (1.25, "1.25 s"), (25.0, "25.0 s"), (None, "-"), (math.inf, "-"), (math.nan, "-"),
])
def test_seconds(value, text) -> None:
    assert fmt.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0.4, "0:00"), (7, "0:07"), (759.6, "12:40"), (3723, "1:02:03"), (None, "-"), (math.inf, "-"), (-3, "0:00"),
])
def test_duration(value, text) -> None:
    assert fmt.duration(value) == text


def test_rates_and_sizes() -> None:
    assert fmt.flops(818e6) == "818 MFLOP"
    assert fmt.rate(818e6, 5.1e-3) == "160 GFLOP/s"
    assert fmt.rate(0, 1.0) == "-" and fmt.rate(1e9, math.inf) == "-"
    assert fmt.bytes_(4_950_000) == "4.95 MB" and fmt.bytes_(12) == "12.0 B"
    assert fmt.factor(1.266) == "1.27×" and fmt.factor(None) == "-"
