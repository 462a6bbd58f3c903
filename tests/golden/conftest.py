"""Golden files: what is made today, compared as text with what was made when somebody last looked at it.

``pytest tests/golden --update-golden`` writes them anew; the difference is then read in the commit. Targets and thread
counts are fixed, nothing reads the user's data, and no file may depend on the machine that runs the tests.
"""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest
from golden_files import Golden

HERE = Path(__file__).parent
_SHOWN = 60  # lines of a difference


@pytest.fixture(autouse=True)
def _no_user_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """``golden(name, text)`` compares with the file ``name``, or writes it."""

    def compare(name: str, text: str) -> None:
        file, text = HERE / name, text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            return
        kept = file.read_text(encoding="utf-8") if file.exists() else ""
        if text != kept:
            lines = list(unified_diff(kept.splitlines(), text.splitlines(), f"tests/golden/{name}", "now", lineterm=""))
            pytest.fail("\n".join([*lines[:_SHOWN], "if that is meant: pytest tests/golden --update-golden"]), False)

    return compare
