"""No test file lies where pytest does not look."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_every_test_file_is_collected(request: pytest.FixtureRequest) -> None:
    passed_over = request.config.getini("norecursedirs")
    hidden = [
        file for file in TESTS.rglob("test_*.py")
        if any(fnmatch(part, pattern) for part in file.relative_to(TESTS.parent).parts[:-1] for pattern in passed_over)
    ]
    assert hidden == []
    assert "build" in passed_over  # the name that once hid 56 tests: the list is really pytest's
