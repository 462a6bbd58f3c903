"""The shipped rules with their certificates: one JSON file for each area, written by the generator.

``rules_AREA.json`` holds the rules, one a line; ``generation/report.json`` what the generator counted, the pairs that
were not proved with the reason, and the near misses with the sizes where they differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from mlc.substitution.codec import RuleError, dump_rule, load_rule, rule_text
from mlc.substitution.generate import Generation
from mlc.substitution.rule import Rule
from mlc.substitution.space import AREAS, FAMILIES

__all__ = ["FORMAT", "area_of", "library", "read_rules", "write_library"]

FORMAT = 1
_FAMILY_AREAS = {family.name: family.area for family in FAMILIES}


@cache
def library() -> tuple[Rule, ...]:
    """All shipped rules, in the order in which they were found; each has a certificate."""
    folder = files("mlc.substitution") / "library"
    found: list[Rule] = []
    for area in AREAS:
        place = folder / f"rules_{area}.json"
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


def area_of(rule: Rule) -> str:
    """The area of a rule that the generator named."""
    return _FAMILY_AREAS.get(rule.name.partition("/")[0], "other")


def write_library(folder: Path, made: Generation) -> list[Path]:
    """Write the rules of a run and its report; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    areas: dict[str, list[Rule]] = {}
    for rule in made.rules:
        areas.setdefault(area_of(rule), []).append(rule)
    written = []
    for area, rules in areas.items():
        lines = ",\n".join(json.dumps(dump_rule(rule), separators=(",", ":")) for rule in rules)
        path = folder / f"rules_{area}.json"
        path.write_text(f'{{"format": {FORMAT}, "rules": [\n{lines}\n]}}\n', "utf-8")
        written.append(path)
    path = folder / "generation" / "report.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(_report(made), indent=1) + "\n", "utf-8")
    return [*written, path]


def _report(made: Generation) -> dict[str, Any]:
    near = [{"source": miss.source, "target": miss.target,
             "inputs": {name: [str(size) for size in shape] for name, shape in miss.shapes.items()},
             "differs_at": miss.sizes} for miss in made.near]
    quarantined = [{"rule": rule_text(q.rule), "reason": q.reason} for q in made.quarantined]
    return {"format": FORMAT, "complete": made.complete, "states": dict(made.states), "quarantined": quarantined,
            "near_misses": near}
