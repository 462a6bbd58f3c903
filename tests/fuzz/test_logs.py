"""A sample of the damaged and crafted tuning logs; ``python -m tests.fuzz.logs --count 1000`` tries many."""

from __future__ import annotations

import pytest

from tests.fuzz.harness import BAD, cases, run
from tests.fuzz.logs import CASE_SECONDS, STRATEGIES, check, warm_up


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


@pytest.mark.parametrize("strategy", [
    pytest.param(strategy, marks=() if number % 3 == 0 else pytest.mark.slow)  # a case takes seconds
    for number, strategy in enumerate(sorted(STRATEGIES))
])
def test_no_wrong_number_crash_hang_or_traceback(strategy: str) -> None:
    (verdict,) = run(cases([strategy], 1, seed=1), check, CASE_SECONDS)
    assert verdict.outcome not in BAD, verdict
