"""No test file lies where pytest does not look."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

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


class _Item:
    """As much of a collected test as the hook looks at."""

    def __init__(self, function: str, every: int | None, case: int = 0) -> None:
        self.parent, self.name, self.originalname, self._every, self.slow = "file", function, function, every, False
        self.nodeid = f"file::{function}[{case}]"

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return None if self._every is None else getattr(pytest.mark, name)(self._every).mark

    def add_marker(self, name: str) -> None:
        self.slow = name == "slow"


@pytest.fixture
def options(request: pytest.FixtureRequest) -> object:
    # by its path: `import conftest` finds whichever conftest.py was collected last
    return request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


def test_of_a_sampled_functions_cases_every_so_many_is_not_slow(options: Any) -> None:
    items = [_Item("a", 3, i) if i % 2 else _Item("b", None, i) for i in range(8)][:-4] + [
        _Item("a", 3, i) for i in (5, 7)]
    options.pytest_collection_modifyitems(items)
    assert [item.slow for item in items if item.name == "a"] == [i % 3 > 0 for i in range(4)]
    assert sum(not item.slow for item in items if item.name == "b") == 1


def test_of_many_cases_a_sixth_is_not_slow(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(cases: Iterable[int]) -> list[str]:
        items = [_Item("many", None, i) for i in cases]
        options.pytest_collection_modifyitems(items)
        return sorted(item.nodeid for item in items if not item.slow)

    monkeypatch.delenv("MLC_TEST_SAMPLE", raising=False)
    usual = kept(range(60))
    assert len(usual) == 10 and usual == kept(reversed(range(60)))
    assert len({int(name[11:-1]) % 2 for name in usual}) == 2  # of two parameters' cases some of each
    assert len(kept(range(1))) == len(kept(range(8))) == 1
    monkeypatch.setenv("MLC_TEST_SAMPLE", "tonight's")
    other = kept(range(60))
    assert len(other) == 10 and other != usual
