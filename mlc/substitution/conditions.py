"""Preconditions: the weakest expressible condition on sizes under which a rule is proved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from mlc.operators.index import Condition, Poly, divides, equal
from mlc.substitution.prove import Proved, Refuted, prove
from mlc.substitution.refute import draw_sizes, judge
from mlc.substitution.rule import Rule

__all__ = ["Strengthened", "strengthen", "synthesise"]

_SAMPLES, _MOST, _TRIED = 240, 4, 12


@dataclass(frozen=True)
class Strengthened:
    """``rule`` has the conditions ``added`` and its certificate. ``counterexamples`` has one for each of ``added``: it
    meets all others, so that none can be dropped; the last is one of the rule as it stood."""

    rule: Rule
    added: tuple[Condition, ...]
    counterexamples: tuple[Refuted, ...]


def strengthen(rule: Rule) -> Rule:
    """The rule under the weakest condition found, with its certificate; as it stands if it is proved so, and without
    a certificate where no condition is found."""
    proof = prove(rule, refute=False)
    if isinstance(proof, Proved):
        return replace(rule, certificate=proof.certificate)
    found = synthesise(rule)
    return found.rule if found is not None else replace(rule, certificate=None)


def synthesise(rule: Rule) -> Strengthened | None:
    """Conditions for a rule that is wrong as it stands, None if none of those tried serves.

    Sampled sizes are judged by evaluation. The conditions that every right sample meets are necessary; if they exclude
    all wrong ones, a smallest subset that does is the precondition. Else conditions that exclude the wrong ones and
    keep most of the right ones are tried. What is returned is proved.
    """
    samples = draw_sizes(rule, _SAMPLES)
    verdicts = [judge(rule, sizes) for sizes in samples]
    kept = [(s, v) for s, v in zip(samples, verdicts, strict=True) if isinstance(v, Refuted) or v]
    if not kept:
        return None
    right = np.array([not isinstance(v, Refuted) for _, v in kept])
    wrong = [v for _, v in kept if isinstance(v, Refuted)]
    if not right.any() or not wrong:
        return None
    candidates = list(_candidates(sorted(samples[0])))
    holds = [np.array([bool(c.evaluate(s)) for s, _ in kept]) for c in candidates]
    for chosen in _choices(candidates, holds, right):
        conditions = tuple(candidates[c] for c in chosen)
        stronger = replace(rule, conditions=(*rule.conditions, *conditions), certificate=None)
        proof = prove(stronger, refute=False)
        if not isinstance(proof, Proved):
            continue
        witnesses = []
        for c in chosen:
            others = np.logical_and.reduce([np.ones(len(kept), bool), *(holds[o] for o in chosen if o != c)])
            witnesses += [v for (_, v), ok in zip(kept, others, strict=True) if ok and isinstance(v, Refuted)][:1]
        return Strengthened(replace(stronger, certificate=proof.certificate), conditions, (*witnesses, wrong[0]))
    return None


def _candidates(symbols: Sequence[str]) -> Iterator[Condition]:
    """Weakest first: divisibility, equal sizes, size 1, and the sizes of a larger kernel."""
    for one, other in combinations(symbols, 2):
        yield equal(Poly.symbol(one), Poly.symbol(other))
    for one in symbols:
        yield equal(Poly.symbol(one), 1)
    for one in symbols:
        for other in symbols:
            if one != other:
                yield divides(Poly.symbol(one), Poly.symbol(other))


def _choices(candidates: Sequence[Condition], holds: Sequence[np.ndarray], right: np.ndarray
             ) -> Iterator[tuple[int, ...]]:
    """Sets of conditions that no wrong sample meets, those that keep most right ones first."""
    def excludes(chosen: Sequence[int]) -> bool:
        met = np.logical_and.reduce([np.ones(len(right), bool), *(holds[c] for c in chosen)])
        return not (met & ~right).any() and bool((met & right).any())

    necessary = [c for c in range(len(candidates)) if holds[c][right].all() and not holds[c].all()]
    if excludes(necessary):
        for size in range(1, _MOST + 1):
            minimal = [s for s in combinations(necessary[:24], size) if excludes(s)]
            yield from minimal[:_TRIED]
            if minimal:
                break
        yield tuple(_reduced(necessary, excludes))
    useful = [c for c in range(len(candidates)) if (holds[c] & right).sum() > 1 and not holds[c].all()]
    useful.sort(key=lambda c: -int((holds[c] & right).sum()))
    found: list[tuple[int, ...]] = []
    for size in (1, 2, 3):
        for chosen in combinations(useful[:40], size):
            if not any(set(f) <= set(chosen) for f in found) and excludes(chosen):
                found.append(chosen)
    found.sort(key=lambda s: -int((np.logical_and.reduce([holds[c] for c in s]) & right).sum()))
    yield from found[:_TRIED]


def _reduced(chosen: list[int], enough) -> list[int]:  # type: ignore[no-untyped-def]
    for candidate in list(reversed(chosen)):
        without = [c for c in chosen if c != candidate]
        if enough(without):
            chosen = without
    return chosen
