"""Results of benchmarks that take hours: each is on disk as soon as it is there, and not measured again.

Tables that are published go to ``results.md`` beside this file, each between two markers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "Results", "inserted", "publish", "write_whole"]

PAGE = Path(__file__).with_name("results.md")


class Results:
    """The rows of ``FOLDER/results.json``, one for each model, in the order in which they were first measured."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.json"
        self.rows: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            self.rows = {row["model"]: row for row in json.loads(self._file.read_text(encoding="utf-8"))}

    def fill(
        self, models: Iterable[str], measure: Callable[[str], dict[str, Any]], again: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Measure the models that have no row, or all of them ``again``; yields each new row once it is written."""
        for model in models:
            if model not in self.rows or again:
                self.rows[model] = measure(model)
                write_whole(self._file, json.dumps(list(self.rows.values()), indent=2))
                yield self.rows[model]


def write_whole(file: Path, text: str) -> None:
    """Write a file so that whoever is killed meanwhile leaves the old one or the new one."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def publish(section: str, text: str, page: Path = PAGE) -> None:
    """Write a table into ``page``, between the markers of ``section``."""
    write_whole(page, inserted(page.read_text(encoding="utf-8"), section, text))


def inserted(page: str, section: str, text: str) -> str:
    """``page`` with ``text`` between the markers of ``section``; raises ``ValueError`` where they are gone."""
    begin, end = f"<!-- {section}: begin -->\n", f"<!-- {section}: end -->"
    start = page.index(begin) + len(begin)
    return page[:start] + text.rstrip("\n") + "\n" + page[page.index(end, start):]
