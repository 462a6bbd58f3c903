"""Writing a library of rules: what a generation proved, and its report.

``rules_AREA.json`` holds the rules, one a line; ``generation/report.json`` what the generator counted, the pairs that
were not proved with the reason, and the near misses with the sizes where they differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlc.substitution.codec import dump_rule, rule_text
from mlc.substitution.generate import Generation
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import FORMAT
from mlc.substitution.space import area_of

__all__ = ["write_library"]
def write_library(folder: Path, made: Generation) -> list[Path]:
    """Write the rules of a run and its report; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    areas: dict[str, list[Rule]] = {}
    for rule in made.rules:
        areas.setdefault(area_of(rule.name), []).append(rule)
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
