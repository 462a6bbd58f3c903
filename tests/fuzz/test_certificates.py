"""A sample of forged certificates and wrong rules; ``make fuzz`` is the whole."""

from __future__ import annotations

import pytest

from mlc.substitution.shipped import shipped_rules
from tests.fuzz import certificates, wrong_rules
from tests.fuzz.harness import BAD, Case, run


@pytest.mark.parametrize("strategy", certificates.STRATEGIES)
def test_no_forged_certificate_is_accepted(strategy: str) -> None:
    assert shipped_rules()
    verdicts = run([Case(strategy, seed) for seed in range(7_000_000, 7_000_004)], certificates.check_case, seconds=30)
    assert not [v for v in verdicts if v.outcome in BAD]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", sorted(set(wrong_rules.STRATEGIES)))
def test_no_wrong_rule_is_proved(strategy: str) -> None:
    assert shipped_rules()
    verdicts = run([Case(strategy, 7_000_000)], wrong_rules.check, seconds=60)
    assert not [v for v in verdicts if v.outcome in BAD]


def test_there_are_strategies_enough() -> None:
    """A third of the wrong rules have partial functions."""
    assert len(certificates.STRATEGIES) >= 10
    kinds = wrong_rules.STRATEGIES
    assert len(set(kinds)) >= 20
    assert 3 * sum(kind in wrong_rules.PARTIAL_KINDS for kind in kinds) >= len(kinds)
