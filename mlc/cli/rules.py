"""``mlc rules``: prove substitution rules, check their certificates, show them."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options, rules_library
from mlc.cli.outcome import Command, Outcome, run_chosen
from mlc.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    action = options.actions(parser)
    verify = action("verify", "prove the rules of a file, or check their certificates; exit code 1 where one is wrong "
                    "or undecided", _verify)
    verify.add_argument("file", type=Path, metavar="FILE", help="rules in mlc's own JSON or in TASO's")
    verify.add_argument("--seconds", type=options.positive_float, default=60.0, metavar="S",
                        help="give up on a rule after S seconds (default: 60)")
    show = action("show", "show a rule: both sides, its precondition and its certificate", _show)
    show.add_argument("name", metavar="NAME", help="the name of a shipped rule, or of one in --file")
    rules_library.add_actions(action)
    show.add_argument("--file", type=Path, metavar="FILE", help="rules to look in (default: the shipped ones)")


def _verify(args: argparse.Namespace) -> Outcome:
    from mlc.substitution.verify import bounded_verdicts, read_rules

    found = bounded_verdicts(read_rules(args.file), args.seconds)
    counts = Counter(v.status for v in found)
    document = {"file": str(args.file), "rules": [v.document() for v in found],
                "summary": {s: counts[s] for s in ("proved", "conditional", "refuted", "undecided")}}

    def render(console: Console) -> None:
        for v in found:
            more = f": {v.precondition}" if v.precondition else f": {v.reason}" if v.reason else ""
            console.print(f"{v.id}  {v.status}{more}", soft_wrap=True)
        console.print(f"{len(found)} rules: " + ", ".join(f"{n} {s}" for s, n in counts.items()), soft_wrap=True)

    return Outcome(document, render, exit_code=1 if counts["refuted"] or counts["undecided"] else 0)


def _show(args: argparse.Namespace) -> Outcome:
    from mlc.substitution.codec import condition_text, dump_rule, rule_text
    from mlc.substitution.shipped import shipped_rules
    from mlc.substitution.verify import read_rules

    given = [rule for _, variants in read_rules(args.file) for rule in variants] if args.file else None
    rules = shipped_rules() if given is None else given
    rule = next((r for r in rules if r.name == args.name), None)
    if rule is None:
        raise UsageError(f"a rule must have the name {args.name!r}, but none of {len(rules)} has it; "
                         "`mlc rules list` names the shipped ones")
    certificate: Any = rule.certificate
    steps = Counter(step[0] for output in (certificate or {}).get("outputs", ()) for step in output["steps"])
    document = {"rule": dump_rule(rule), "precondition": " and ".join(map(condition_text, rule.conditions)) or None,
                "certificate_steps": dict(steps) if certificate else None}

    def render(console: Console) -> None:
        console.print(rule_text(rule), soft_wrap=True)
        summary = ", ".join(f"{n} {name}" for name, n in steps.items()) or "no steps"
        console.print(f"  certificate: {summary}" if certificate else "  no certificate: it is never applied",
                      soft_wrap=True)

    return Outcome(document, render)


COMMAND = Command("rules", "prove, check and show graph substitutions", _add_arguments, run_chosen, needs_tvm=False)
