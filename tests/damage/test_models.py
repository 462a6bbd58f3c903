"""A sample of the damage to model files; ``python -m tests.damage.models --count 10000`` is the whole."""

from __future__ import annotations

import pytest

from mlc.frontend import load_model
from tests.damage.harness import BAD, Case, run
from tests.damage.models import STRATEGIES, check
from tests.damage.networks import NETWORKS, network


@pytest.fixture(scope="module", autouse=True)
def importer() -> None:
    load_model(network("dense"))  # imports what every case needs


@pytest.mark.parametrize("name", NETWORKS)
def test_the_networks_are_sound(name: str) -> None:
    assert load_model(network(name)).outputs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_damage_ends_badly(strategy: str) -> None:
    seeds = [7_000_000 + seed for seed in (*range(1, 6), 20)]  # the last is compiled and run as well
    verdicts = run([Case(strategy, seed) for seed in seeds], check)
    assert not [v for v in verdicts if v.outcome in BAD]
