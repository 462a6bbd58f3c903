"""Modules as text where TVM's printer knows not what to make of a function."""

from pathlib import Path

import numpy as np
from onnx import numpy_helper, parser

import mlc


def test_a_function_that_cannot_be_printed_does_not_end_the_build(tmp_path: Path, monkeypatch) -> None:
    rng = np.random.default_rng(5)
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 19]>
        g (float[t, 3, 6] x, int32[3] l) => (float[r, s, p] y, float[r, s, p] h) {
        y, h = RNN<hidden_size=21, direction="reverse">(x, w, r, bias, l) }""")
    model.graph.output[0].type.tensor_type.shape.dim.add()
    for name, shape in (("w", (1, 21, 6)), ("r", (1, 21, 21)), ("bias", (1, 42))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype("float32"), name))
    monkeypatch.setenv("MLC_DUMP_DIR", str(tmp_path))
    executable = mlc.compile(model, target="x86-64-v3", log=False)
    text = (tmp_path / "build_scheduled.py").read_text(encoding="utf-8")
    assert "cannot be printed" in text and "@T.prim_func" in text
    assert all(each["symbol"] in text for each in executable.metadata["functions"])
