"""The recurrent layers that are timed: what they compute, what they become, and their table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import mlc
from tests.performance import recurrent
from tests.performance.recurrent import MODELS, Recurrent, markdown


@pytest.mark.parametrize("name", ["lstm", "lstm_both_ways", "gru", "gru_reset_before", "rnn"])
def test_a_layer_is_one_kernel_over_its_steps(name: str) -> None:
    """Its product with the inputs is another. This is what makes them quick to compile."""
    model = MODELS[name].onnx()
    tasks = mlc.Compilation.of(model, substitutions=False).tasks()
    assert len(tasks) <= 6
    assert sum(task.weight for task in tasks if task.name == "recurrent") == MODELS[name].layers


def test_the_model_computes_what_onnxruntime_does() -> None:
    small = replace(MODELS["lstm_both_ways"], hidden=24, steps=18, features=7, batch=2)
    model = small.onnx()
    x = np.random.default_rng(1).standard_normal((18, 2, 7), np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    assert expected.shape == (18, 2, 48) and 0.05 < expected.std() < 1
    np.testing.assert_allclose(mlc.compile(model, log=False)(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_every_operator_has_a_row() -> None:
    assert {model.operator for model in MODELS.values()} == {"LSTM", "GRU", "RNN"}
    assert Recurrent("GRU", reset_after=False) in MODELS.values()


def test_the_table() -> None:
    def row(model: str, ours: float) -> dict[str, object]:
        times = {"mlc-untuned": ours, "onnxruntime": 5.0, "openvino": 3.0}
        return {"model": model, "machine": "a CPU", "threads": 2, "build_seconds": 4.21,
                "results": [{"engine": name, "median_ms": ms, "max_rel_err": 3e-7} for name, ms in times.items()]}

    text = markdown([row("lstm", 2.0), row("gru", 6.0)])
    assert "| lstm | **2** | 5 | 3 | 1.50 | 4.2 | 3e-07 |" in text
    assert "| gru | 6 | 5 | **3** | 0.50 | 4.2 | 3e-07 |" in text
    assert "Geometric mean of the ratios: 0.87" in text


def test_mlc_builds_for_the_target_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def compared(name: str, *_: object, target: str) -> dict[str, object]:
        told.append(target)
        return {"model": name, "machine": "a CPU", "threads": 2, "build_seconds": 4.21,
                "results": [{"engine": "mlc-untuned", "median_ms": 1.0, "max_rel_err": None}]}

    monkeypatch.setattr(recurrent, "compared", compared)
    recurrent.main(["--models", "rnn", "--target", "x86-64-v2", "--output", str(tmp_path)])
    assert told == ["x86-64-v2"]
