"""Shipped rules before both judges that are no part of the checker, with progress, and resumed where it was ended:
``python -m tests.fuzz.judges --instances 10000 --state build/judges.jsonl``.

Each rule is evaluated at random (sizes include 1, values 0) and put to Z3, a rule for many ranks at the lowest and the
highest. A rule that Z3 has not done with in a minute counts as unknown. What was judged is noted by the hash of the
rule, so that a library that changed has the rest judged alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlc.substitution.codec import content_hash
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import shipped_rules
from tests.unit.substitution.smt import judgement_in_time
from tests.unit.substitution.test_second_judge import at_ranks, instances

__all__ = ["main"]

_SIZES = 100


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=10_000, metavar="N", help="random instances of each rule")
    parser.add_argument("--judges", choices=("both", "random", "z3"), default="both")
    parser.add_argument("--state", type=Path, metavar="FILE", help="where to note what was judged, and look it up")
    given = parser.parse_args(argv)
    if given.instances < 1:
        parser.error(f"the number of instances must be at least 1, but got {given.instances}")
    rules = at_ranks(shipped_rules())
    for judge in ("random", "z3"):
        if given.judges not in ("both", judge):
            continue
        if not _judged(judge, rules, given.instances, given.state):
            return 1
    return 0


def _judged(judge: str, rules: Sequence[Rule], number: int, state: Path | None) -> bool:
    """Whether nothing speaks against any of the rules."""
    key = f"{judge} {number if judge == 'random' else ''}".strip()
    known = _read(state, key)
    found: list[dict[str, Any]] = [known[content_hash(rule)] for rule in rules if content_hash(rule) in known]
    pending = [rule for rule in rules if content_hash(rule) not in known]
    started = said = time.monotonic()
    for place, rule in enumerate(pending):
        answer = {"judge": key, "rule": rule.name, "hash": content_hash(rule), **_answer(judge, rule, number)}
        found.append(answer)
        if state is not None:
            state.parent.mkdir(parents=True, exist_ok=True)
            with state.open("a", encoding="utf-8") as file:
                file.write(json.dumps(answer) + "\n")
        now = time.monotonic()
        if answer["against"] or now - said > 10 or place + 1 == len(pending):
            said, left = now, (now - started) / (place + 1) * (len(pending) - place - 1)
            print(f"{key}: {len(found)} of {len(rules)} rules, {_counts(found)}, {now - started:.0f} s, about "
                  f"{left:.0f} s left", flush=True)
    for answer in found:
        if answer["against"]:
            print(f"against {answer['rule']}: {answer['against'][0]}")
    if not pending:
        print(f"{key}: {len(found)} of {len(rules)} rules, {_counts(found)}, all of an earlier run")
    return not any(answer["against"] for answer in found)


def _answer(judge: str, rule: Rule, number: int) -> dict[str, Any]:
    if judge == "random":
        return {"against": [str(each.reason) for each in instances(rule, number, _SIZES)]}
    said = judgement_in_time(rule)
    return {"against": said.against, "answered": said.answered, "unknown": said.given_up}


def _counts(found: Sequence[dict[str, Any]]) -> str:
    against = f"{sum(bool(answer['against']) for answer in found)} with something against"
    if not any("answered" in answer for answer in found):
        return against
    answered, unknown = (sum(answer[each] for answer in found) for each in ("answered", "unknown"))
    sure = sum(not answer["unknown"] and not answer["against"] for answer in found)
    return f"{answered} questions answered, {unknown} unknown, {sure} rules without an unknown, {against}"


def _read(state: Path | None, key: str) -> dict[str, dict[str, Any]]:
    """What was noted, but for a line that was cut off, which is ended."""
    if state is None or not state.exists():
        return {}
    found: dict[str, dict[str, Any]] = {}
    text = state.read_text("utf-8")
    if text and not text.endswith("\n"):
        with state.open("a", encoding="utf-8") as file:
            file.write("\n")
    for line in text.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and answer.get("judge") == key:
            found[answer["hash"]] = answer
    return found


if __name__ == "__main__":
    sys.exit(main())
