"""``mlc rules generate`` and ``mlc rules list``: generate the library of rules, and list it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.cli import options
from mlc.cli.outcome import Outcome
from mlc.errors import MlcError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mlc.substitution.completeness import Derivation
    from mlc.substitution.rule import Rule

__all__ = ["add_actions"]

#: of a uniform search: what is found in minutes takes hours to decide
_BEYOND_SECONDS = 840.0


def add_actions(action: options.Action) -> None:
    """Enter both into ``mlc rules``; ``action(name, help, run)`` makes a parser."""
    generate = action("generate", "search for substitutions, prove them, and write the library", _generate)
    generate.add_argument("-o", "--output", type=Path, metavar="DIR",
                          help="the folder to write (default: the library of this installation)")
    generate.add_argument("--seconds", type=options.positive_float, metavar="S",
                          help=f"stop after S seconds and keep what was found (default: search the whole space; "
                               f"{_BEYOND_SECONDS:g} with --beyond)")
    generate.add_argument("--families", metavar="NAME,…", help="only the families of these names (NAME* for several)")
    generate.add_argument("--beyond", action="store_true",
                          help="search a part of the operator table uniformly for rules that do not follow from the "
                               "installed library: three operators a side, and four of the core")
    generate.add_argument("--compare", action="store_true",
                          help="compare with the installed library; exit code 1 if they differ")
    show = action("list", "list the rules of the library, or check whether rules of a file follow from them", _list)
    show.add_argument("--derives", type=Path, metavar="FILE",
                      help="for each rule of FILE (TASO's JSON or mlc's), check whether it follows from the library; "
                           "exit code 1 if a sound one does not")
    show.add_argument("--library", dest="folder", type=Path, metavar="DIR",
                      help="a folder that `mlc rules generate` wrote")


def _generate(args: argparse.Namespace) -> Outcome:
    from mlc.report.console import stderr_console
    from mlc.substitution.generate import Generation, generate
    from mlc.substitution.publish import difference, write_library
    from mlc.substitution.shipped import FOLDER, shipped_rules
    from mlc.substitution.space import area_of

    families = _families(args.families, beyond=args.beyond)
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        raise UsageError(f"the output must be a folder, but {args.output} is a file; give another -o")
    if args.output is None and (args.families or args.seconds or args.beyond):
        raise UsageError("a part of the library must not replace the whole: give a folder with -o")
    if args.compare and args.output is None:
        raise UsageError("a library that is compared must not replace the one that it is compared with: give a folder "
                         "with -o")
    console = stderr_console()

    def progress(made: Generation, family: str, share: float) -> None:
        left = f"about {made.seconds * (1 - share) / share:.0f} s left: " if share and not made.undecided else ""
        states = ", ".join(f"{made.states[name]} {name}" for name in ("pairs", "distinct", "derived", "proved",
                                                                       "quarantined", "near"))
        console.print(f"{share:4.0%} {made.seconds:4.0f} s, {left}{family}: {states}")

    seconds = args.seconds or (_BEYOND_SECONDS if args.beyond else None)
    made = generate(families, seconds, progress, shipped_rules() if args.beyond else ())
    folder = args.output or FOLDER
    try:
        written = write_library(folder, made)
    except OSError as error:
        raise MlcError(f"the library cannot be written to {folder}: {error}; give another folder with -o") from error
    areas = Counter(area_of(rule.name) for rule in made.rules)
    document = {"folder": str(folder), "files": [str(path) for path in written], "rules": len(made.rules),
                "areas": dict(areas), "states": dict(made.states), "seconds": made.seconds, "complete": made.complete}
    apart = difference(made.rules, shipped_rules()) if args.compare else None
    if apart is not None:
        document["difference"] = apart

    def render(out: Console) -> None:
        kinds = ", ".join(f"{count} of {area}" for area, count in areas.items())
        out.print(f"{len(made.rules)} rules ({kinds}) in {made.seconds:.0f} s, written to {folder}")
        if made.covered:
            verdicts = ", ".join(f"{made.states[name]} {name}" for name in ("refuted", "undefined", "quarantined"))
            out.print(f"{made.states['distinct']} laws of a uniform search: {made.states['proved']} proved (of which "
                      f"{made.states['derived']} follow from others and {len(made.unplaced)} were not compared with "
                      f"them), {verdicts}, {len(made.undecided)} undecided when the time was up")
        if made.skipped:
            out.print(f"the time was up before {len(made.skipped)} families were searched: {', '.join(made.skipped)}")
        if apart is not None:
            for kind, names in apart.items():
                if names:
                    out.print(f"{len(names)} {kind.replace('_', ' ')}: {', '.join(names)}")
            if not any(apart.values()):
                out.print("it is the library of this installation, rule for rule and proof for proof")

    return Outcome(document, render, exit_code=1 if apart is not None and any(apart.values()) else 0)


def _families(text: str | None, beyond: bool) -> Any:
    from fnmatch import fnmatchcase

    from mlc.substitution.space import FAMILIES, UNIFORM

    offered = UNIFORM if beyond else FAMILIES
    if text is None:
        return offered
    chosen = []
    for pattern in text.split(","):
        found = [family for family in offered if fnmatchcase(family.name, pattern)]
        if not found:
            raise UsageError(f"no family is named {pattern}; there are {', '.join(f.name for f in offered)}")
        chosen += [family for family in found if family not in chosen]
    return tuple(chosen)


def _list(args: argparse.Namespace) -> Outcome:
    from mlc.substitution.shipped import read_rules, shipped_rules
    from mlc.substitution.space import area_of

    if args.folder is not None and not args.folder.exists():
        raise UsageError(f"no folder of rules is at {args.folder}; `mlc rules generate -o DIR` makes one")
    rules = shipped_rules() if args.folder is None else tuple(read_rules(args.folder))
    if args.derives is not None:
        return _derives(args.derives, rules)
    from mlc.substitution.codec import condition_text, graph_text, rule_text

    document = {"rules": [
        {"name": rule.name, "area": area_of(rule.name),
         "source": graph_text(rule.source), "target": graph_text(rule.target),
         "inputs": {name: [str(size) for size in shape] for name, shape in rule.shapes.items()},
         "conditions": [condition_text(c) for c in rule.conditions], "blocks": sorted(rule.blocks),
         "proved": rule.certificate is not None}
        for rule in rules]}

    def render(out: Console) -> None:
        for rule in rules:
            out.print(rule_text(rule), soft_wrap=True)
        out.print(f"{len(rules)} rules")

    return Outcome(document, render)


def _derives(path: Path, rules: tuple[Rule, ...]) -> Outcome:
    from mlc.report.console import stderr_console
    from mlc.substitution.completeness import derivations

    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"the file of rules must be readable, but {error}") from error
    except ValueError as error:
        raise UsageError(f"the file of rules must be JSON, but {path} is not: {error}") from error
    if isinstance(data, dict):
        data = data.get("rules")
    if not isinstance(data, list):
        raise UsageError(f'the file of rules must be a list or {{"rules": […]}}, but {path} is neither')
    console = stderr_console()

    def progress(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            console.print(f"{done} of {total} rules")

    found = derivations(data, rules, progress)
    counts = Counter(d.status for d in found)
    sound = counts["derived"] + counts["missing"]
    document = {"derived": counts["derived"], "missing": counts["missing"], "unsound": counts["unsound"],
                "share": counts["derived"] / sound if sound else None, "rules": [_plain(d) for d in found]}

    def render(out: Console) -> None:
        for d in found:
            if d.status != "derived":
                out.print(f"{d.rule}: {d.status}: {d.reason}")
        out.print(f"{counts['derived']} of {sound} sound rules follow from the library of {len(rules)}; "
                  f"{counts['unsound']} are unsound")

    return Outcome(document, render, exit_code=1 if counts["missing"] else 0)


def _plain(derivation: Derivation) -> dict[str, Any]:
    return {"rule": derivation.rule, "status": derivation.status, "precondition": list(derivation.precondition),
            "reason": derivation.reason}
