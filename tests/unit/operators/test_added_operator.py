"""An operator is added by its entry in the table alone: everything else derives what it needs of it.

The one exception is on purpose: the checker of certificates shares no facts about functions with what it judges.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What became of two operators in a process of its own, where they were entered first."""
    program = Path(__file__).with_name("added_operator.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_imported(seen: dict[str, Any]) -> None:
    assert {"square", "atan"} < set(seen["read"])
    assert "opaque" not in seen["read"]


def test_it_is_evaluated(seen: dict[str, Any]) -> None:
    assert seen["evaluated"]


def test_a_rule_matches_it(seen: dict[str, Any]) -> None:
    assert "neg" in seen["read"] and "neg" not in seen["taken"]
    assert seen["cheaper"]


def test_it_is_written_and_folded(seen: dict[str, Any]) -> None:
    """The square of the constant is made when the model is compiled, the other one is left."""
    assert seen["written"] == 1
    assert seen["error"] < 1e-5


def test_it_is_priced(seen: dict[str, Any]) -> None:
    assert seen["priced"]


def test_passes_know_it(seen: dict[str, Any]) -> None:
    assert seen["sunk"] == "relax.atan relax.permute_dims"
    assert seen["blocked"]


def test_rules_of_it_are_proved_and_checked(seen: dict[str, Any]) -> None:
    assert seen["proved"] == [True, True]
    assert seen["refuted"]


def test_checker_grants_a_law_that_it_knows_itself(seen: dict[str, Any]) -> None:
    assert not seen["granted"]
    assert seen["granted then"]
