"""A sample of the damage to files of rules; ``python -m tests.fuzz.rules --count 200`` is the whole."""

from __future__ import annotations

import pytest

from mlc.substitution import check as _checker  # noqa: F401 - imported here, not in every case
from mlc.substitution.shipped import shipped_rules
from tests.fuzz.harness import BAD, Case, run
from tests.fuzz.rules import STRATEGIES, check


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_damage_ends_badly(strategy: str) -> None:
    assert shipped_rules()
    verdicts = run([Case(strategy, seed) for seed in range(7_000_000, 7_000_004)], check, seconds=30)
    assert not [v for v in verdicts if v.outcome in BAD]
