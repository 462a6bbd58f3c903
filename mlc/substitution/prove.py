"""``prove(rule)``: a proof for every size that the rule admits, a counterexample, or the reason why there is neither.

Source and target are composed from the operators' specifications into the scalar expression of one output element at
symbolic indices, over symbolic sizes of at least 1. Their difference becomes a sum of guarded terms
(:mod:`mlc.substitution.normal`), which changes of variables, case splits and cancellations take to zero
(:mod:`mlc.substitution.goal_merge`); every side condition has a witness (:mod:`mlc.substitution.entailment`). The steps
with their witnesses are the certificate, bound to the rule by the hash of its content; :mod:`mlc.substitution.check`
plays them again on its own. Elements are real numbers: rounding is not modelled. That the target is defined wherever
the source is, is proved apart (:mod:`mlc.substitution.goal_defined`): every element that the target reads and every
partial function that it evaluates, for an element of the output, is one that the source reads or evaluates for it. A
tensor of which the target reads more has to be defined as a whole for the rule to be applied. A rule for many ranks is
proved with one axis for each block, if :mod:`mlc.substitution.check.ranks` says that this is a proof.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from mlc.operators import ShapeError
from mlc.operators.index import Condition, Poly
from mlc.operators.scalar import Read
from mlc.substitution.assume import assumed, composed, plain, settled
from mlc.substitution.check.elements import WITHIN
from mlc.substitution.check.integers import CertificateError
from mlc.substitution.check.ranks import check_blocks
from mlc.substitution.codec import RuleError, condition_text, content_hash
from mlc.substitution.compose import compose, with_sizes
from mlc.substitution.entailment import Facts, without_remainders
from mlc.substitution.expand import Expander
from mlc.substitution.goal import Goal
from mlc.substitution.goal_defined import divisors_of, prove_defined
from mlc.substitution.goal_merge import prove_goal
from mlc.substitution.normal import Stuck
from mlc.substitution.refute import Refuted, find_counterexample, spoiling
from mlc.substitution.rule import Rule

__all__ = ["Proof", "Proved", "Refuted", "Undecided", "certified", "prove"]

FORMAT = 3


@dataclass(frozen=True)
class Proved:
    """Source and target are equal; ``certificate`` is JSON."""

    certificate: Mapping[str, Any]


@dataclass(frozen=True)
class Undecided:
    reason: str


Proof: TypeAlias = Proved | Refuted | Undecided


def prove(rule: Rule, refute: bool = True) -> Proof:
    """Decides a rule. Raises :class:`RuleError` for one that means nothing: unknown operators, wrong arity, unbound
    inputs, shapes that can never fit. ``refute=False`` looks for no counterexample."""
    try:
        return Proved(_Prover(rule).certificate())
    except Stuck as stuck:
        reason = str(stuck)
    if refute:
        found = find_counterexample(rule)
        if found is not None:
            return found
    return Undecided(reason)


def certified(rule: Rule) -> Rule:
    """The rule with its certificate; raises :class:`RuleError` with the reason if it cannot be proved."""
    proof = prove(rule)
    if isinstance(proof, Proved):
        return replace(rule, certificate=proof.certificate)
    verdict = "it is wrong" if isinstance(proof, Refuted) else "it is not proved"
    raise RuleError(f"rule {rule.name}: {verdict}: {proof.reason}")


def _anywhere(tensor: Any, facts: Sequence[Poly]) -> tuple[Expander, list[str], tuple[Poly, ...], list[Poly]]:
    """An expander, and for an element at any place the variables, the indices, and the facts about them."""
    context = [f"@{k}" for k in range(tensor.rank)]
    indices = tuple(map(Poly.symbol, context))
    ranges = [p for i, s in zip(indices, tensor.shape, strict=True) for p in (i, without_remainders(s) - 1 - i)]
    return Expander(), context, indices, [*facts, *ranges]


class _Defined:
    """Proofs that one side's elements are defined where the other's are; ``whole`` are the tensors of which more
    elements are read, so that all of them have to be defined; ``thorough`` is whether cases are tried."""

    def __init__(self, facts: Sequence[Poly], whole: Sequence[str] = (), thorough: bool = False) -> None:
        self.facts, self.whole, self.thorough = facts, list(whole), thorough

    def prove(self, one: Any, other: Any) -> dict[str, Any]:
        """The steps by tensor, those for partial functions under the empty name; raises :class:`Stuck` for these."""
        expander, context, indices, facts = _anywhere(one, self.facts)
        given, wanted = expander.demands(one[indices]), expander.demands(other[indices])
        proofs: dict[str, Any] = {}
        for group in sorted({_group(t) for t in wanted} - set(self.whole)):
            theirs, ours = (tuple(t for t in terms if _group(t) == group) for terms in (wanted, given))
            for tightens, thorough, attains in ((False, False, False), (True, False, False), (True, True, False),
                                                (True, True, True)):
                if thorough and (group or not self.thorough):
                    continue
                expander.thorough, expander.attains = thorough, attains
                if attains:
                    expander.work = expander.bounds = expander.steps = 0
                goal = Goal(expander, context, facts, theirs, ours, divisors_of(given), counts=False,
                            tightens=tightens)
                try:
                    proofs[group] = prove_defined(goal)
                    break
                except Stuck:
                    if tightens and not group and (attains or not self.thorough):
                        raise
                    if tightens and group == WITHIN:
                        raise
            else:
                self.whole.append(group)
        return proofs


def _group(demand: Any) -> str:
    """The tensor that is read; empty for a function."""
    [atom] = demand.atoms
    return atom.tensor if isinstance(atom, Read) else ""


class _Prover:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def certificate(self) -> dict[str, Any]:
        if self.rule.blocks:
            try:
                check_blocks(self.rule)
            except (CertificateError, ShapeError) as error:
                raise Stuck(f"it is no rule for many ranks: {error}") from error
        given = assumed(self.rule)
        solved = with_sizes(self.rule, given.values)
        outputs, _ = composed(solved)
        try:
            others, demands = compose(solved.target, solved.shapes)
        except ShapeError as error:
            raise Stuck(f"the target is ill-formed: {error}") from error
        shapes = self._demand(given.facts, demands, "the target may be ill-formed: {} must hold")
        if len(outputs) != len(others):
            raise RuleError(f"rule {self.rule.name}: both sides must have as many outputs, "
                            f"but got {len(outputs)} and {len(others)}")
        proofs: list[dict[str, Any]] = []
        elements = []
        for place, (one, other) in enumerate(zip(outputs, others, strict=True)):
            if one.rank != other.rank:
                raise Stuck(f"output {place} has rank {one.rank} in the source and {other.rank} in the target")
            equal = [Condition(a - b, "==") for a, b in zip(one.shape, other.shape, strict=True)]
            sizes = self._demand(given.facts, equal, "output shapes must be equal: {} must hold")
            expander, context, indices, facts = _anywhere(one, given.facts)
            try:
                mine, theirs = one[indices], other[indices]
            except ShapeError as error:  # of gathers, at numbers that are computed
                raise Stuck(f"output {place} must have elements: {error}") from error
            left, right = expander.expand(mine), expander.expand(theirs)
            divisors = divisors_of(expander.demands(mine))
            steps = prove_goal(Goal(expander, context, facts, left, right, divisors))
            proofs.append({"shape": sizes, "steps": steps})
            elements.append((one, other))
        there, back = spoiling(self.rule)
        forward, backward = _Defined(given.facts, sorted(there), True), _Defined(given.facts, sorted(back))
        for proof, (one, other) in zip(proofs, elements, strict=True):
            proof["defined"] = forward.prove(one, other)
        turned: list[dict[str, Any]] | None = None
        with suppress(Stuck):
            turned = [backward.prove(other, one) for one, other in elements]
        found = {"format": FORMAT, "rule": content_hash(self.rule), "assume": given.steps, "demands": shapes,
                 "outputs": proofs, "backward": turned,
                 "whole": {"forward": forward.whole, "backward": backward.whole if turned is not None else []}}
        return dict(json.loads(json.dumps(found)))

    def _demand(self, facts: list[Poly], conditions: list[Condition], sentence: str) -> list[Any]:
        """What shows that conditions follow; raises :class:`Stuck` for the first that isn't shown to."""
        found, known = [], Facts(facts)
        for condition in conditions:
            poly, divisions = settled(condition.poly, known)
            witnesses = known.holds(Condition(poly, condition.relation))
            if witnesses is None:
                raise Stuck(sentence.format(condition_text(condition)))
            found.append([divisions, [plain(w) for w in witnesses]])
        return found
