"""A sample of the random models; ``python -m tests.damage.random_models --count 1000`` is the whole."""

from __future__ import annotations

import onnx
import pytest

from mlc.frontend import load_model
from tests.damage.harness import Case, Outcome, run
from tests.damage.networks import network
from tests.damage.random_models import SECONDS, case_network, check
from tests.damage.random_networks import KINDS


@pytest.fixture(scope="module", autouse=True)
def importer() -> None:
    load_model(network("dense"))  # imports what every case needs


@pytest.mark.parametrize("kind", KINDS)
def test_networks_are_sound_and_say_how_exact_they_can_be(kind: str) -> None:
    found = case_network(Case(kind, 7))
    onnx.checker.check_model(found.model, full_check=True)
    assert len(found.model.graph.node) >= 3
    for outputs, moved in zip(found.outputs, found.moved, strict=True):
        assert outputs and set(outputs) == set(moved)
        assert all(0 <= each < 0.1 for each in moved.values())


@pytest.mark.parametrize("kind", ["image", "sequence", "mixed"])
def test_random_models_are_right(kind: str) -> None:
    (verdict,) = run([Case(kind, 9_000_000)], check, seconds=SECONDS, extra_bytes=8 << 30)
    assert verdict.outcome is Outcome.RIGHT, verdict
