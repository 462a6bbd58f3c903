"""Fixtures that the tests of the graph room share."""

from __future__ import annotations

import pytest

from mlc.graph.estimate import Estimate


@pytest.fixture
def always_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of tests are so small that blocks seldom pay; what is blocked must compute the same all the same."""
    monkeypatch.setattr(Estimate, "plain", lambda self, conv: 1.0)
