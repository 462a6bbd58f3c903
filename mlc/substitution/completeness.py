"""Which rules of a file follow from the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlc.substitution.codec import RuleError, condition_text, load_rule
from mlc.substitution.conditions import strengthen
from mlc.substitution.derive import derivable
from mlc.substitution.egraph import Limits
from mlc.substitution.fingerprint import agree, assignments
from mlc.substitution.rule import Rule
from mlc.substitution.taso import read_taso

__all__ = ["Derivation", "derivations"]

LIMITS = Limits(rounds=20, nodes=60_000, work=2e6)


@dataclass(frozen=True)
class Derivation:
    """``status``: "derived", "missing" (sound, but the library does not give it) or "unsound" (no condition saves it).

    A rule that is read at several ranks has one for each. ``precondition`` is what had to be added for it to be sound.
    """

    rule: str
    status: str
    precondition: tuple[str, ...] = ()
    reason: str = ""


def derivations(data: Sequence[Mapping[str, Any]], rules: Sequence[Rule],
                progress: Callable[[int, int], None] | None = None) -> list[Derivation]:
    """For each rule of a list in TASO's format or in ours; raises :class:`RuleError` for one that cannot be read.

    ``rules`` without a certificate do not count.
    """
    rules = [rule for rule in rules if rule.certificate is not None]
    found: list[Derivation] = []
    for place, entry in enumerate(data):
        if not isinstance(entry, dict):
            raise RuleError(f"a rule is an object, but number {place} is of type {type(entry).__name__}")
        readings = [load_rule(entry)] if "inputs" in entry else read_taso(entry)
        found.extend(_derivation(reading, rules) for reading in readings)
        if progress is not None:
            progress(place + 1, len(data))
    return found


def _derivation(rule: Rule, rules: Sequence[Rule]) -> Derivation:
    sound = strengthen(rule)
    if sound.certificate is None:
        return Derivation(rule.name, "unsound", reason="it is not proved, whatever condition was tried")
    added = tuple(condition_text(c) for c in sound.conditions[len(rule.conditions):])
    sizes = next(_generic(sound), None)
    if sizes is None:
        return Derivation(rule.name, "missing", added, "no sizes that its precondition admits were found")
    if derivable(rules, [sound], LIMITS, [sizes])[0]:
        return Derivation(rule.name, "derived", added)
    return Derivation(rule.name, "missing", added, f"the sides stay apart at {dict(sizes)}")


def _generic(rule: Rule) -> Iterator[Mapping[str, int]]:
    """Sizes at which both sides are well-formed: many different ones, few ones."""
    fitting = [s for s in assignments(rule, 60, largest=8) if agree(rule, s)]
    yield from sorted(fitting, key=lambda s: (-len(set(s.values())), list(s.values()).count(1)))
