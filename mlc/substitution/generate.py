"""The rule generator: enumerate, compare fingerprints, find the most general sizes, drop implied rules, prove.

Pairs of every family (:mod:`mlc.substitution.space`) become candidates, simple ones first. A candidate that the rules
so far derive by saturation is dropped, unless its family says otherwise; the others are proved for all sizes, or
quarantined with the reason. A proved rule becomes one for as many ranks as can be shown, so that the same at other
ranks follows; one whose source ends in a concatenation gives another one with two outputs.
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from mlc.substitution.abstract import abstracted, law_text
from mlc.substitution.candidates import NearMiss, candidate, canonical, in_context, joined, same_pair, weight
from mlc.substitution.codec import RuleError, content_hash, graph_text, rule_text
from mlc.substitution.corrected import corrected_rules
from mlc.substitution.derive import derivable
from mlc.substitution.enumerate import Counts, Term, pairs
from mlc.substitution.family import Family
from mlc.substitution.fingerprint import assignments
from mlc.substitution.merge_ranks import general_rule, general_rules
from mlc.substitution.prove import Proved, prove
from mlc.substitution.ranks import expansions
from mlc.substitution.refute import defined_somewhere, find_counterexample
from mlc.substitution.rule import Rule
from mlc.substitution.space import FAMILIES

__all__ = ["Covered", "Generation", "Quarantined", "generate"]

#: how many candidates are looked at in one saturation, how many are proved before the next, and of a uniform search
BATCH, ROUND, UNIFORM_ROUND = 40, 6, 20
#: the part of a uniform search's time for proofs
_PROVING = 0.75
#: a proof that takes more time of the processor is given up
PROOF_SECONDS = 180.0
Progress = Callable[["Generation", str, float], None]


@dataclass(frozen=True)
class Quarantined:
    """A pair that agrees wherever it was evaluated, but was not proved."""

    rule: Rule
    reason: str


@dataclass(frozen=True)
class Covered:
    """What a uniform family searched: all graphs of up to ``depth`` of its steps. ``laws`` are its ``pairs``, instances
    of one taken together; ``candidates`` those that say the same at other sizes, too."""

    family: Family
    graphs: int
    pairs: int
    laws: int
    candidates: int


@dataclass
class Generation:
    """What came of a run; ``states`` counts graphs, values, pairs, distinct, derived, proved, refuted, undefined,
    quarantined, near, and the rules that were others of another rank. ``skipped`` are the families that there was no
    time for, as a whole or in part; ``undecided`` what uniform ones found that nobody looked at, smallest first, and
    ``unplaced`` what of it was proved, but not compared with the rules; what follows from ``known`` is no rule."""

    rules: list[Rule] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)
    near: list[NearMiss] = field(default_factory=list)
    covered: list[Covered] = field(default_factory=list)
    undecided: list[Rule] = field(default_factory=list)
    unplaced: list[Rule] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    complete: bool = True
    known: Sequence[Rule] = ()


def generate(families: Sequence[Family] = FAMILIES, seconds: float | None = None,
             progress: Progress | None = None, known: Sequence[Rule] = ()) -> Generation:
    """Rules of all families that do not follow from those that are ``known``; ``seconds`` bounds the time, whereafter
    ``complete`` is False. What uniform families find is put together, and decided smallest first."""
    made, start = Generation(known=known), time.monotonic()

    def left() -> float:
        return float("inf") if seconds is None else seconds - (time.monotonic() - start)

    for place, family in enumerate(families):
        if not _family(made, family, left):
            made.skipped.append(family.name)
        made.seconds = time.monotonic() - start
        if progress is not None:
            progress(made, family.name, (place + 1) / len(families))
        if left() <= 0:
            made.skipped += [later.name for later in families[place + 1:]]
            break
    if made.undecided:
        _decide(made, left, progress)
    made.complete = not (made.skipped or made.undecided or made.unplaced)
    made.seconds = time.monotonic() - start
    before = len(made.rules)
    made.rules = general_rules(made.rules)
    made.states["ranks"] = before - len(made.rules)
    return made


def _family(made: Generation, family: Family, left: Callable[[], float]) -> bool:
    """Whether all of it was searched before the time was up."""
    if family.sides is not None:
        _prove(made, canonical(Rule(family.name, family.inputs, *family.sides)))
        return True
    if family.near:
        return _corrected(made, family, left)
    counts = Counts()
    found: dict[str, Rule] = {}
    misses: dict[str, NearMiss] = {}
    seen: set[str] = set()
    for one, other in pairs(family, counts):
        if left() <= 0:
            return False
        made.states["pairs"] += 1
        one, other, within = _law(family, one, other)
        key = law_text(one, other) if family.uniform else same_pair(family, one, other)
        if key in seen:
            continue
        seen.add(key)
        result = candidate(within, one, other)
        if isinstance(result, Rule):
            found.setdefault(_text(result), result)
        elif result is not None:
            misses.setdefault(f"{result.source} = {result.target}", result)
    made.states["graphs"] += counts.graphs
    made.states["values"] += counts.values
    made.states["distinct"] += len(found)
    made.states["near"] += len(misses)
    made.near.extend(misses.values())
    candidates = sorted(found.values(), key=weight)
    if family.uniform:
        made.covered.append(Covered(family, counts.graphs, counts.graphs - counts.values, len(seen), len(found)))
        made.undecided += candidates
        return True
    if family.derived:
        for rule in candidates:
            _prove(made, rule)
        return True
    before = len(made.rules)
    whole = _keep(made, candidates, left)
    _minimise(made, before)
    return whole


def _corrected(made: Generation, family: Family, left: Callable[[], float]) -> bool:
    """The rules that corrections make of a family's near misses, and those that nothing corrects; whether there was
    time for all."""
    counts = Counts()
    for near, rule in corrected_rules(family, counts):
        if left() <= 0:
            return False
        if rule is None:
            sizes = next(assignments(near, 1), None)
            made.near.append(NearMiss(graph_text(near.source), graph_text(near.target), near.shapes, sizes))
            made.states["near"] += 1
        elif (proved := _certified(made, rule)) is not None:
            made.rules.append(proved)
    made.states["graphs"] += counts.graphs
    made.states["values"] += counts.values
    return True


def _decide(made: Generation, left: Callable[[], float], progress: Progress | None) -> None:
    """Proves or refutes what uniform families found, smallest first, in most of the time that is left; in the rest of
    it keeps of what is proved what does not follow from the rules so far. A proof takes less than a derivation."""
    pending = sorted({_law_of(rule): rule for rule in reversed(made.undecided)}.values(), key=weight)
    made.states["distinct"] += len(pending) - len(made.undecided)
    made.undecided, until = [], (1 - _PROVING) * left() if math.isfinite(left()) else 0.0
    for place, rule in enumerate(pending):
        if left() <= until:
            made.undecided = pending[place:]
            break
        proved = _certified(made, rule)
        if proved is not None:
            made.unplaced.append(proved)
        if progress is not None and place % 500 == 499:
            progress(made, "proved or refuted", (place + 1) / len(pending))
    while made.unplaced and left() > 0:
        front, rest = made.unplaced[:BATCH], made.unplaced[BATCH:]
        kept = list(_underived(_known(made), front))
        made.states["derived"] += len(front) - len(kept)
        made.unplaced = kept[UNIFORM_ROUND:] + rest
        for rule in kept[:UNIFORM_ROUND]:
            _add(made, rule)


def _law_of(rule: Rule) -> str:
    """A text that rules share which differ in the names of sizes only."""
    names: dict[str, str] = {}
    for symbol in re.findall(r"[a-z]+\d+", " ".join(str(size) for shape in rule.shapes.values() for size in shape)):
        names.setdefault(symbol, f"s{len(names)}")
    return re.sub(r"[a-z]+\d+", lambda found: names.get(found[0], found[0]), _text(rule))


def _law(family: Family, one: Term, other: Term) -> tuple[Term, Term, Family]:
    """The pair, or of a uniform family the law that it is an instance of, and whose inputs that has."""
    if not family.uniform:
        return one, other, family
    within, one, other = abstracted(family, one, other)
    return one, other, within


def _minimise(made: Generation, begin: int) -> None:
    """Drop the rules from ``begin`` on that the others derive, special ones (few inputs) first."""
    for rule in sorted(made.rules[begin:], key=lambda r: (len(r.shapes), len(r.symbols))):
        if len(rule.source.outputs) > 1:
            continue
        others = [*made.known, *(other for other in made.rules if other is not rule)]
        if derivable(others, [rule])[0] and all(derivable(others, [one])[0] for _, one in expansions(rule)):
            made.rules.remove(rule)
            made.states["redundant"] += 1


def _known(made: Generation) -> list[Rule]:
    """What nothing has to be proved for again: what follows from a quarantined pair would only be quarantined too."""
    return [*made.known, *made.rules, *(q.rule for q in made.quarantined)]


def _text(rule: Rule) -> str:
    return rule_text(replace(rule, name=""))


def _keep(made: Generation, pending: list[Rule], left: Callable[[], float]) -> bool:
    """Prove what the rules so far do not derive, simple ones first; whether there was time for all."""
    while pending:
        if left() <= 0:
            return False
        before = len(pending)
        pending = list(_underived(_known(made), pending[: 4 * BATCH])) + pending[4 * BATCH:]
        made.states["derived"] += before - len(pending)
        size = weight(pending[0])[0] if pending else 0
        now = [rule for rule in pending[:ROUND] if weight(rule)[0] == size]
        pending = pending[len(now):]
        for rule in now:
            # alone, since a batch may have been cut short by its limits
            if derivable(_known(made), [rule])[0]:
                made.states["derived"] += 1
            else:
                _prove(made, rule)
    return True


def _underived(rules: Sequence[Rule], candidates: Sequence[Rule]) -> Iterable[Rule]:
    for begin in range(0, len(candidates), BATCH):
        batch = candidates[begin: begin + BATCH]
        derived = derivable(rules, batch) if rules else [False] * len(batch)
        yield from (rule for rule, known in zip(batch, derived, strict=True) if not known)


def _prove(made: Generation, rule: Rule) -> None:
    proved = _certified(made, rule)
    if proved is not None:
        _add(made, proved)


def _certified(made: Generation, rule: Rule) -> Rule | None:
    """The rule with its certificate; None, and counted, where there is no proof."""
    rule = replace(rule, name=f"{rule.name}/{content_hash(rule)[:8]}")
    if not defined_somewhere(rule):
        made.states["undefined"] += 1
        return None
    try:
        with _time_limit(PROOF_SECONDS):
            proof = prove(rule, refute=False)
    except (RuleError, TimeoutError) as error:
        made.states["quarantined"] += 1
        made.quarantined.append(Quarantined(rule, str(error)))
        return None
    if isinstance(proof, Proved):
        made.states["proved"] += 1
        return replace(rule, certificate=proof.certificate)
    if find_counterexample(rule) is not None:  # the field agrees by chance, of functions that are laws alone there
        made.states["refuted"] += 1
        return None
    made.states["quarantined"] += 1
    made.quarantined.append(Quarantined(rule, proof.reason))
    return None


def _add(made: Generation, proved: Rule) -> None:
    """Keeps a rule at as many ranks as can be shown, and those that it gives with two outputs."""
    made.rules.append(general_rule(proved) or proved)
    if len(proved.source.outputs) == 1:
        bare = replace(proved, certificate=None)
        for two in filter(None, (joined(bare), in_context(bare))):
            _prove(made, replace(two, name=proved.name.partition("/")[0]))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body after ``seconds``; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"no proof was found in {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    # again and again, since an exception in a destructor is swallowed
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
