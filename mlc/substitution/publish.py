"""Writes a library of rules with the report of its generation.

``rules_AREA.json`` holds the rules, one a line; ``generation/report.json`` what the generator counted, the pairs that
were not proved with the reason, the near misses with the sizes where they differ, and which part of the table was
searched uniformly and which was left.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlc.operators import OPERATORS
from mlc.substitution.codec import dump_rule, rule_text
from mlc.substitution.family import Step
from mlc.substitution.generate import Generation
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import FORMAT
from mlc.substitution.space import area_of

__all__ = ["difference", "write_library"]


def difference(rules: Iterable[Rule], others: Iterable[Rule]) -> dict[str, list[str]]:
    """The names of ``rules`` that are not among ``others``, of others that are not among them, and of those that are
    proved otherwise. A name ends in the hash of what the rule says."""
    ours, theirs = ({rule.name: rule for rule in each} for each in (rules, others))
    proved = [name for name in ours if name in theirs and ours[name].certificate != theirs[name].certificate]
    return {"new": [name for name in ours if name not in theirs],
            "missing": [name for name in theirs if name not in ours], "proved_otherwise": proved}


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
    return {"format": FORMAT, "complete": made.complete, "skipped": made.skipped, "states": dict(made.states),
            "uniform": _uniform(made), "quarantined": quarantined, "near_misses": near}


def _uniform(made: Generation) -> dict[str, Any]:
    """What was searched without a choice of what may meet, and the operators of the table that were not."""
    covered = [{"family": each.family.name, "operators_a_side": each.family.depth,
                "inputs": {name: [str(size) for size in shape] for name, shape in each.family.inputs.items()},
                "steps": [_step(step) for step in each.family.steps], "graphs": each.graphs, "pairs": each.pairs,
                "laws": each.laws, "candidates": each.candidates} for each in made.covered]
    met = {step.op for each in made.covered for step in each.family.steps}
    sizes = Counter(len(rule.source.nodes) + len(rule.target.nodes) for rule in made.undecided)
    laws = {"found": made.states["distinct"],
            **{state: made.states[state] for state in ("proved", "refuted", "undefined", "quarantined")},
            "proved_and_consequences": made.states["derived"], "proved_and_new": len(made.rules),
            "proved_and_not_compared": len(made.unplaced), "undecided": len(made.undecided),
            "undecided_by_operators": dict(sorted(sizes.items()))}
    return {"covered": covered, "laws": laws if covered else {}, "operators_left": sorted(set(OPERATORS) - met)}


def _step(step: Step) -> str:
    return " ".join([step.op, *(f"{name}={value}" for name, value in step.attributes.items())])
