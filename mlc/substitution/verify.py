"""Verdicts on the rules of a file, in TASO's or mlc's JSON."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mlc import subprocesses
from mlc.substitution.codec import RuleError, condition_text, dump_rule, load_rule
from mlc.substitution.conditions import synthesise
from mlc.substitution.prove import Proved, Refuted, prove
from mlc.substitution.refute import defined_somewhere, find_counterexample
from mlc.substitution.rule import Rule
from mlc.substitution.taso import read_taso

__all__ = ["Verdict", "bounded_verdicts", "read_rules", "verdict"]

_SECONDS = 60.0  # for one rule
_MOST_BYTES, _MOST_RULES = 64 << 20, 10_000  # of a file


@dataclass(frozen=True)
class Verdict:
    """``status`` is proved, conditional (proved under ``precondition``), refuted or undecided.

    ``counterexample`` is one of the rule as it stands; ``rules`` are the proved ones with their certificates, one for
    each rank; ``reason`` says why a rule is not proved as it stands, or that it is proved of nothing.
    """

    id: Any
    status: str
    precondition: str | None = None
    counterexample: Refuted | None = None
    reason: str = ""
    rules: tuple[Rule, ...] = ()

    def document(self) -> dict[str, Any]:
        found = self.counterexample
        example = None if found is None else {"sizes": dict(found.sizes), "reason": found.reason,
                                              "shapes": {n: list(s) for n, s in found.shapes.items()},
                                              "values": dict(found.values)}
        return {"id": self.id, "status": self.status, "precondition": self.precondition, "counterexample": example,
                "reason": self.reason or None}


def read_rules(path: Path) -> list[tuple[Any, list[Rule]]]:
    """The rules of a file with their ids; a rule of TASO's is several, one for each rank.

    Raises :class:`RuleError` with the rule's name and the reason for the first that means nothing.
    """
    try:
        if path.is_file() and path.stat().st_size > _MOST_BYTES:
            raise RuleError(f"a file of rules must have at most {_MOST_BYTES >> 20} MiB, but {path} has "
                            f"{path.stat().st_size >> 20}; split it")
        data = json.loads(path.read_text("utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise RuleError(f"a file of rules must be readable, but {path} is not: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RuleError(f"a file of rules must be JSON, but {path} is not: {error}") from error
    rules = data.get("rules", [data]) if isinstance(data, dict) else data
    if not isinstance(rules, list) or not rules:
        raise RuleError(f"a file of rules must hold a list of at least one rule, but {path} holds none")
    if len(rules) > _MOST_RULES:
        raise RuleError(f"a file of rules must hold at most {_MOST_RULES:,}, but {path} holds {len(rules):,}; split it")
    return [(_identity(rule), read_taso(rule) if isinstance(rule, dict) and "src" in rule else [load_rule(rule)])
            for rule in rules]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose keys must differ: of equal ones Python keeps the last without a word."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _identity(rule: Any) -> Any:
    """The id or the name, in one line."""
    found = rule.get("id", rule.get("name")) if isinstance(rule, Mapping) else None
    return found if found is None or isinstance(found, int) else " ".join(str(found)[:200].splitlines())


def bounded_verdicts(rules: Sequence[tuple[Any, Sequence[Rule]]], seconds: float = _SECONDS) -> list[Verdict]:
    """:func:`verdict` of each in another process; undecided where one takes too long, too deep or too much memory.

    Proofs search, and a file may ask for one that takes for ever. ``seconds`` are those of one verdict. The process is
    kept from one to the next, since proofs share what they have worked out, and replaced where it had to be ended.
    """
    found: list[Verdict] = []
    while len(found) < len(rules):
        found += _answers(rules[len(found) :], seconds)
    return found


def _answers(rules: Sequence[tuple[Any, Sequence[Rule]]], seconds: float) -> Iterator[Verdict]:
    """The verdicts of one process, up to the first that it cannot give.

    It is a fresh one: a fork would have the locks of this one's other threads, and z3's belief in its own.
    """
    reading, writing = os.pipe()
    here = Connection(reading, writable=False)
    child = subprocess.Popen(subprocesses.command("mlc.substitution.prover", str(writing)), stdin=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, pass_fds=[writing], env=subprocesses.environment())
    os.close(writing)
    try:
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin as stdin:
            pickle.dump(rules, stdin)
        for identity, _ in rules:
            try:
                answer = here.recv() if here.poll(seconds) else f"it took longer than {seconds:g} s"
            except EOFError:
                answer = "the process that looked for a proof died"
            if isinstance(answer, RuleError):
                raise answer
            if not isinstance(answer, Verdict):
                yield Verdict(identity, "undecided", reason=answer)
                return
            yield answer
    finally:
        child.kill()
        child.wait()
        here.close()


def verdict(identity: Any, rules: Sequence[Rule]) -> Verdict:
    """Proves the rules, all as they stand, or under conditions. Raises :class:`RuleError` for what means nothing."""
    proved: list[Rule] = []
    conditions: list[str] = []
    counterexample, reasons, vacuous = None, [], ""
    for rule in rules:
        one = _one(identity, rule)
        if one.status in ("refuted", "undecided"):
            return one
        proved += one.rules
        vacuous = vacuous or (one.reason if one.status == "proved" else "")
        if one.status == "conditional":
            conditions.append(one.precondition or "")
            reasons.append(one.reason)
            counterexample = counterexample or one.counterexample
    if not conditions:
        return Verdict(identity, "proved", reason=vacuous, rules=tuple(proved))
    return Verdict(identity, "conditional", "; ".join(conditions), counterexample, "; ".join(reasons), tuple(proved))


def _one(identity: Any, rule: Rule) -> Verdict:
    if rule.certificate is not None:
        from mlc.substitution.check import CertificateError, check

        try:
            check(dump_rule(rule))
        except CertificateError as error:
            return Verdict(identity, "undecided", reason=f"its certificate is not valid: {error}")
        return Verdict(identity, "proved", reason=_vacuous(rule), rules=(rule,))
    proof = prove(rule, refute=False)
    if isinstance(proof, Proved):
        certified = replace(rule, certificate=proof.certificate)
        return Verdict(identity, "proved", reason=_vacuous(rule), rules=(certified,))
    reason = proof.reason
    found = synthesise(rule)
    if found is not None:
        example = found.counterexamples[-1]
        return Verdict(identity, "conditional", _precondition(rule, found.added), example, example.reason,
                       (found.rule,))
    counterexample = find_counterexample(rule)
    if counterexample is not None:
        return Verdict(identity, "refuted", None, counterexample, counterexample.reason)
    return Verdict(identity, "undecided", reason=reason)


def _vacuous(rule: Rule) -> str:
    """What to say of a proved rule of which the source is defined nowhere; nothing of others."""
    return "" if defined_somewhere(rule) else "of nothing: no element of its source was seen to be defined"


def _precondition(rule: Rule, added: Sequence[Any]) -> str:
    """The added conditions, and what their symbols are."""
    symbols = {s for c in added for s in c.poly.symbols}
    shapes = [f"{name}: [{', '.join(map(str, shape))}]" for name, shape in rule.shapes.items()
              if any(symbols & size.symbols for size in shape)]
    return f"{' and '.join(map(condition_text, added))} where {', '.join(shapes)}"


def verdicts(rules: Sequence[tuple[Any, list[Rule]]]) -> Iterator[Verdict]:
    for identity, variants in rules:
        yield verdict(identity, variants)
