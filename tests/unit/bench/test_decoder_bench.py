"""The decoder that is generated with: the model, what its weights take, and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper

import mlc
from tests.performance.decoder import Run, _mlc, markdown
from tests.performance.decoders import Sizes, decoder, eager, save, sizes_of, weight_bytes

SMALL = Sizes(layers=1, width=64, inner=96, heads=4, groups=2, vocabulary=64, capacity=16)


@pytest.mark.slow
@pytest.mark.parametrize("accuracy", [0, None])
def test_the_model_computes_what_onnxruntime_does(accuracy: int | None) -> None:
    model = decoder(SMALL, accuracy)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ids, empty = np.array([[3, 1, 4, 1, 5]]), np.zeros((1, SMALL.groups, 0, SMALL.head), np.float32)
    past = {each.name: empty for each in session.get_inputs() if each.name.startswith("past")}
    wanted = session.run(["logits"], {"input_ids": ids, "attention_mask": np.ones_like(ids), **past})[0]
    assert 0.3 < wanted.std() < 3, "random weights keep the scale"
    found = mlc.Generator(model, capacity=SMALL.capacity, log=False).logits(ids)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_token_reads_words_and_scales() -> None:
    tensors = [numpy_helper.to_array(tensor) for tensor in decoder(SMALL).graph.initializer]
    words = [a for a in tensors if a.dtype == np.uint8]
    assert weight_bytes(SMALL) == sum(a.nbytes + 4 * a.shape[0] * a.shape[1] for a in words)
    assert weight_bytes(Sizes()) == pytest.approx(647e6, rel=1e-3)


def test_a_token_reads_every_weight_of_float32() -> None:
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in decoder(SMALL, None).graph.initializer}
    read = [a for name, a in tensors.items() if a.ndim == 2 and name.endswith("weight") and "embed" not in name]
    assert weight_bytes(SMALL, "llama") == sum(a.nbytes for a in read)
    assert weight_bytes(sizes_of("llama"), "llama") == pytest.approx(4.14e9, rel=1e-2)
    assert weight_bytes(sizes_of("gpt2"), "gpt2") == 4 * (12 * 12 * 768 * 768 + 768 * 50257)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_eager_module_has_the_weights_of_the_file(model: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sizes = SMALL if model == "llama" else replace(SMALL, groups=4)
    save(model, sizes, tmp_path / "decoder.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "decoder.onnx", providers=["CPUExecutionProvider"])
    ids, empty = np.array([[3, 1, 4, 1, 5]]), np.zeros((1, sizes.groups, 0, sizes.head), np.float32)
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(5)[None]}
    feeds = {each.name: given.get(each.name, empty) for each in session.get_inputs()}
    with torch.no_grad():
        found = eager(model, sizes, tmp_path / "decoder.onnx")(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(found, session.run(["logits"], feeds)[0], rtol=1e-4, atol=1e-4)


def test_the_table_has_medians_failures_and_what_reading_takes() -> None:
    answer = {"seconds": [0.5, 0.02, 0.03, 0.02], "logits": [1.0, -2.0]}
    turns = {"mlc": [answer], "openvino": [], "reading": [{"seconds": [0.0, 0.016], "logits": []}]}
    run = Run("llama", SMALL, Path("decoder.onnx"), 2, 4, 4)
    assert run.token_bytes == weight_bytes(SMALL, "llama") + 6 * 2 * 2 * 16 * 4
    rows = markdown(turns, replace(run, sizes=Sizes(layers=4)), 1).splitlines()
    read = replace(run, sizes=Sizes(layers=4)).token_bytes / 1e9
    assert rows[2] == f"| mlc | 50.0 | 20.0 | {read / 0.02:.1f} | 500 | 0e+00 |"
    assert rows[3] == "| openvino | failed | | | | |"
    assert rows[4] == f"| reading | 62.5 | 16.0 | {read / 0.016:.1f} | | |"
    assert rows[-1].endswith("A token of mlc's takes 1.25 times as long as reading alone.")


def test_mlc_builds_for_the_target_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each target's build has a file of its own, beside those of this machine."""
    told: list[object] = []

    class Generator:
        def __init__(self, path: Path, **named: object) -> None:
            told.append(named.get("target", path.name))

        def save(self, path: Path) -> None:
            path.touch()

    monkeypatch.setattr(mlc, "Generator", Generator)
    for target in ("native", "x86-64-v2"):
        _mlc(Run("gpt2", SMALL, tmp_path / "decoder.onnx", 2, 4, 4, target))
    assert told == ["native", "decoder.16.2.so", "x86-64-v2", "decoder.16.2.x86-64-v2.so"]
