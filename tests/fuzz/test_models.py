"""A sample of the damage to model files; ``python -m tests.fuzz.models --count 10000`` is the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mlc
from mlc.frontend import load_model
from tests.fuzz import models
from tests.fuzz.harness import BAD, Case, Outcome, run
from tests.fuzz.models import STRATEGIES, check
from tests.fuzz.networks import NETWORKS, network

#: for each kind of damage the seed of a file that is a model all the same, one that takes little time
SOUND = {
    "attribute": 140, "dimensions": 140, "types": 280, "names": 10, "edges": 100, "operators": 40, "order": 10,
    "weights": 10, "versions": 40, "nested": 70, "many": 20, "grown": 110, "several": 220, "flip": 50, "text": 230,
}


@pytest.fixture(scope="module", autouse=True)
def importer() -> None:
    load_model(network("dense"))  # imports what every case needs


@pytest.mark.parametrize("name", NETWORKS)
def test_the_networks_are_sound(name: str) -> None:
    assert load_model(network(name)).outputs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_damage_ends_badly(strategy: str) -> None:
    verdicts = run([Case(strategy, 7_000_000 + seed) for seed in range(1, 6)], check)  # imported, not compiled
    assert not [v for v in verdicts if v.outcome in BAD]


@pytest.mark.parametrize("strategy", SOUND)
def test_what_damage_leaves_a_model_computes_what_it_says(strategy: str) -> None:
    """Nothing is compared where a file is refused, so these are ones that are not."""
    # it is compiled beside other tests: how long that takes is not what is tested
    (verdict,) = run([Case(strategy, 7_000_000 + SOUND[strategy])], check, seconds=60.0)
    assert verdict.outcome is Outcome.RIGHT, verdict.detail


def test_every_kind_of_damage_has_a_model_that_is_run() -> None:
    assert SOUND.keys() == set(STRATEGIES) - {"cut"}  # of which nothing is a model
    assert not any(seed % models.COMPILED for seed in SOUND.values())


def test_a_wrong_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says what is right: onnxruntime, onnx's evaluator where it refuses the model, nobody if both do."""
    computed = models._onnxruntime

    def refused(*_: object) -> None:
        raise RuntimeError("refused")

    def outcome(off: float) -> Outcome:
        def compiled(path: Path, **_: object) -> Callable[..., list[np.ndarray]]:
            names = [each.name for each in load_model(path).inputs]

            def call(*inputs: np.ndarray) -> list[np.ndarray]:
                return [out + np.float32(off) for out in computed(path, dict(zip(names, inputs, strict=True)))]

            return call

        def off_by(case: Case) -> Outcome:
            mlc.compile = compiled  # in a process of its own
            return check(case)

        return run([Case("dimensions", 7_000_000 + SOUND["dimensions"])], off_by)[0].outcome

    assert (outcome(0), outcome(1)) == (Outcome.RIGHT, Outcome.WRONG)
    monkeypatch.setattr(models, "_onnxruntime", refused)
    assert (outcome(0), outcome(1)) == (Outcome.RIGHT, Outcome.WRONG)
    monkeypatch.setattr(models, "_reference", refused)
    assert outcome(1) is Outcome.RIGHT


def test_a_nan_that_is_made_a_whole_number_is_compared_as_zero() -> None:
    """ONNX does not say which number it becomes; engines say different ones."""
    assert check(Case("weights", 7_000_080)) is Outcome.RIGHT
