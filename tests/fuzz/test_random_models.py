"""A sample of the random models; ``python -m tests.fuzz.random_models --count 1000`` is the whole."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from mlc.frontend import load_model
from tests.fuzz.harness import Case, Outcome, run
from tests.fuzz.networks import network
from tests.fuzz.random_models import SECONDS, _agree, case_network, check
from tests.fuzz.random_networks import KINDS, Allowed


@pytest.fixture(scope="module", autouse=True)
def importer() -> None:
    load_model(network("dense"))  # imports what every case needs


@pytest.mark.parametrize("kind", KINDS)
def test_networks_are_sound_and_say_how_exact_they_can_be(kind: str) -> None:
    found = case_network(Case(kind, 7))
    if not kind.startswith(("fused", "bf16")):  # operators of onnxruntime's own, and types that opset 20 lacks
        onnx.checker.check_model(found.model, full_check=True)
    assert len(found.model.graph.node) >= 3
    for outputs, moved, allowed in zip(found.outputs, found.moved, found.allowed, strict=True):
        assert outputs and set(outputs) == set(moved) == set(allowed)
        assert all(0 <= each.average <= each.most for each in allowed.values())
        if kind.split()[0] not in ("quantised", "fused", "f16", "bf16"):
            assert all(0 <= each < 0.1 for each in moved.values())


@pytest.mark.parametrize("kind", ["quantised image", "quantised sequence"])
def test_most_operators_are_between_integers(kind: str) -> None:
    of_type = Counter(node.op_type for seed in range(5) for node in case_network(Case(kind, seed)).model.graph.node)
    assert of_type["QuantizeLinear"] > 15 and of_type["DequantizeLinear"] > 15


def test_onnxruntime_fuses_them() -> None:
    own = Counter(
        node.op_type for kind in ("image", "matrix") for seed in range(10)
        for node in case_network(Case(f"fused {kind}", seed)).model.graph.node
        if node.op_type.startswith("QLinear") or node.domain == "com.microsoft"
    )
    assert own["QLinearConv"] and own["QGemm"] and len(own) > 2, own


@pytest.mark.parametrize(("off", "right"), [(0.0, True), (0.9, True), (1.2, False)])
def test_one_element_may_be_a_step_off_and_no_more(off: float, right: bool) -> None:
    wanted = np.zeros(1000, "float32")
    found = wanted.copy()
    found[3] = off
    assert _agree(found, wanted, Allowed(1.0, 0.01)) is right
    assert not _agree(np.full(1000, 0.02, "float32"), wanted, Allowed(1.0, 0.01)), "all are off a little"
    assert not _agree(wanted.astype("float16"), wanted, Allowed(1.0, 0.01))


@pytest.mark.parametrize("kind", ["image", "sequence", "mixed", "quantised image", "bf16 sequence"])
def test_random_models_are_right(kind: str) -> None:
    (verdict,) = run([Case(kind, 9_000_000)], check, seconds=SECONDS, extra_bytes=8 << 30)
    assert verdict.outcome is Outcome.RIGHT, verdict
