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


class _Item:
    """As much of a collected test as the hook looks at."""

    def __init__(self, function: str, every: int | None) -> None:
        self.parent, self.name, self.originalname, self._every, self.slow = "file", function, function, every, False

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return None if self._every is None else getattr(pytest.mark, name)(self._every).mark

    def add_marker(self, name: str) -> None:
        self.slow = name == "slow"


def test_of_a_sampled_functions_cases_every_so_many_is_not_slow(request: pytest.FixtureRequest) -> None:
    # by its path: `import conftest` finds whichever conftest.py was collected last
    options = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    assert options is not None
    items = [_Item("a", 3) if i % 2 else _Item("b", None) for i in range(16)]
    options.pytest_collection_modifyitems(items)
    assert [item.slow for item in items if item.name == "a"] == [i % 3 > 0 for i in range(8)]
    assert not any(item.slow for item in items if item.name == "b")
