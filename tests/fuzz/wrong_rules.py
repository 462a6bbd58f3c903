"""Wrong rules, none of which may be proved: ``python -m tests.fuzz.wrong_rules --count 3000 --seed 0``.

Shipped rules and laws that are proved in cases, with one change each, a third of them a partial function that cancels.
Only those that evaluation shows to be wrong count; the others are refused as no case. A search for a proof that has not
ended after some seconds has found none.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import cache

from mlc.errors import MlcError
from mlc.operators import ShapeError
from mlc.substitution.prove import Proved, Refuted, prove
from mlc.substitution.refute import find_counterexample
from mlc.substitution.rule import Rule
from mlc.substitution.shipped import shipped_rules
from tests.fuzz import harness
from tests.fuzz.harness import Case, Outcome
from tests.unit.substitution.mutants import KINDS, PARTIAL_KINDS, mutant
from tests.unit.substitution.small_rules import BY_CASES

__all__ = ["STRATEGIES", "check", "main", "wrong_rule"]

#: more than a third are partial functions
STRATEGIES = (*KINDS, *PARTIAL_KINDS)
_TRIES = 40
#: of processor time, for the search of one proof
_SECONDS = 10.0


class _Late(BaseException):
    """The search goes on for too long; nothing on its way catches this."""


class NoCase(MlcError):
    """The change came to nothing wrong."""


@cache
def _small() -> list[Rule]:
    """Shipped rules that are proved soon, and as many of the laws that are proved in cases."""
    found = [rule for rule in shipped_rules() if len(str(rule.certificate)) < 6_000]
    return [*found, *(list(BY_CASES.values()) * (1 + len(found) // len(BY_CASES)))]


def wrong_rule(case: Case) -> Rule:
    """A rule that evaluation shows to be wrong; raises :class:`NoCase` where none was found."""
    rng = case.rng()
    for _ in range(_TRIES):
        try:
            found = mutant(rng, _small(), case.strategy)
            if found is not None and isinstance(find_counterexample(found, tries=20), Refuted):
                return found
        except (MlcError, ShapeError):  # the change made no graph: it gathers at numbers that are computed
            continue
    raise NoCase(f"no wrong rule by {case.strategy} with the seed {case.seed}")


def check(case: Case) -> Outcome:
    """A proof of a wrong rule is wrong."""
    rule = wrong_rule(case)
    before = signal.signal(signal.SIGVTALRM, _late)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        return Outcome.WRONG if isinstance(prove(rule, refute=False), Proved) else Outcome.RIGHT
    except _Late:
        return Outcome.RIGHT
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _late(_number: int, _frame: object) -> None:
    raise _Late


def main(argv: Sequence[str] | None = None) -> int:
    _small()
    return harness.main(STRATEGIES, check, argv, seconds=240)


if __name__ == "__main__":
    sys.exit(main())
