"""The shipped rules with their certificates, in one JSON file per area that the generator writes.

``rules_AREA.json`` holds the rules, one a line; :mod:`mlc.substitution.publish` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mlc.substitution.codec import RuleError, load_rule
from mlc.substitution.rule import Rule
from mlc.substitution.space import AREAS

__all__ = ["FOLDER", "FORMAT", "read_rules", "shipped_rules"]

FORMAT = 1
#: where the shipped rules are
FOLDER = Path(__file__).parent / "library"


@cache
def shipped_rules() -> tuple[Rule, ...]:
    """All shipped rules, in the order in which they were found; each has a certificate."""
    found: list[Rule] = []
    for area in AREAS:
        place = FOLDER / f"rules_{area}.json"
        if place.is_file():
            found.extend(_parsed(place.read_text("utf-8"), str(place)))
    return tuple(found)


def read_rules(path: Path) -> list[Rule]:
    """The rules of a file or of all ``rules_*.json`` in a folder; raises :class:`RuleError` and OSError."""
    paths = sorted(path.glob("rules_*.json")) if path.is_dir() else [path]
    return [rule for file in paths for rule in _parsed(file.read_text("utf-8"), str(file))]


def _parsed(text: str, place: str) -> Iterator[Rule]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RuleError(f"{place} must be JSON, but {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("rules"), list):
        raise RuleError(f'{place} must be {{"format": {FORMAT}, "rules": […]}}; write it by `mlc rules generate`')
    return map(load_rule, data["rules"])
