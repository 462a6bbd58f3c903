"""Names from outside: those of Python's own arguments are only names, and none of them commands a terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import mlc
from mlc.cli.main import main
from mlc.errors import InputError, ModelError
from mlc.report.graph_svg import Box, drawing
from mlc.report.html import CompileReport, FunctionRow, page
from mlc.text import as_html, one_line, visible

HOSTILE = "[bold]\x1b[31m\x9b2J\u202e\r\x07[/]"


def _model(inputs: list[str], outputs: list[str], operator: str = "Relu") -> onnx.ModelProto:
    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3])

    nodes = [helper.make_node("Sub", inputs, ["d"]),
             *(helper.make_node(operator, ["d"], [name], name=f"to {name}") for name in outputs)]
    graph = helper.make_graph(nodes, "g", list(map(value, inputs)), list(map(value, outputs)))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    onnx.save(_model(["self", "repeats"], ["file", "allow_pickle"]), folder / "m.onnx")
    assert main(["compile", str(folder / "m.onnx"), "-o", str(folder / "m.so")]) == 0
    return folder / "m.so"


def test_inputs_and_outputs_named_like_arguments(artifact, tmp_path, capsys) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((2, 3)).astype("float32") for name in ("self", "repeats")}
    words = []
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        words += ["--input", f"{name}={tmp_path / name}.npy"]
    assert main(["run", str(artifact), *words, "-o", str(tmp_path / "plain"), "--repeat", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [i["name"] for i in document["inputs"]] == ["self", "repeats"]
    assert document["output"] == str(tmp_path / "plain") and not (tmp_path / "plain.npz").exists()
    wanted = np.maximum(arrays["self"] - arrays["repeats"], 0)
    with np.load(tmp_path / "plain") as found:
        assert list(found) == ["file", "allow_pickle"]
        for name in found:
            np.testing.assert_allclose(found[name], wanted)


def test_names_with_equals_signs_and_ends_of_lines(tmp_path, capsys) -> None:
    """The longest name that a word begins with is meant, and a name is one line of a table."""
    onnx.save(_model(["a", "a=b"], ["one\nother"]), tmp_path / "m.onnx")
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.so")]) == 0
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 2, 3)).astype("float32")
    np.save(tmp_path / "first.npy", first)
    np.save(tmp_path / "second.npy", second)
    capsys.readouterr()
    words = ["--input", f"a=b={tmp_path / 'second.npy'}", "--input", f"a={tmp_path / 'first.npy'}"]
    assert main(["run", str(tmp_path / "m.so"), *words, "-o", str(tmp_path / "o.npz")]) == 0
    assert r"one\nother" in capsys.readouterr().out
    with np.load(tmp_path / "o.npz") as found:
        np.testing.assert_allclose(found["one\nother"], np.maximum(first - second, 0), rtol=1e-6)
    assert main(["run", str(tmp_path / "m.so"), *words[:2], *words[:2]]) == 2
    assert "--input a=b=... came twice" in capsys.readouterr().err


def test_python_takes_an_input_named_self(artifact) -> None:
    exe = mlc.load(artifact)
    one, other = np.ones((2, 3), "float32"), np.full((2, 3), 0.25, "float32")
    assert all((out == 0.75).all() for out in exe(**{"self": one, "repeats": other}))
    assert len(exe.time(one, other, repeats=2)) == 2 and exe.profile(one, other, repeats=2)
    with pytest.raises(InputError, match="option repeats must be a whole number, got ndarray; give an input of that"):
        exe.time(**{"self": one, "repeats": other})


def test_profiling_the_functions_of_such_a_model(artifact, capsys) -> None:
    assert main(["bench", str(artifact), "--tasks", "--rounds", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"]


@pytest.mark.parametrize("json_too", [False, True])
def test_an_unknown_operator_of_a_hostile_name(json_too, tmp_path, capsys) -> None:
    onnx.save(_model(["a", "b"], ["c"], operator=HOSTILE), tmp_path / "m.onnx")
    assert main(["compile", str(tmp_path / "m.onnx"), *(["--json"] if json_too else [])]) == 1
    seen = capsys.readouterr()
    assert seen.err.startswith("mlc: error: ") and seen.err.count("\n") == 1 and seen.err.rstrip("\n").isprintable()
    assert r"[bold]\x1b[31m\x9b2J\u202e" in seen.err
    assert not json_too or r"\x1b[31m" in json.loads(seen.out)["error"]["message"]


def test_tensors_and_files_of_hostile_names(tmp_path, capsys) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff[red]\x1b[31m.onnx"))
    path.write_bytes(_model([HOSTILE, "b"], ["[/]" + HOSTILE]).SerializeToString())
    built = tmp_path / "m.so"
    assert main(["compile", str(path), "-o", str(built), "--report", str(tmp_path / "r")]) == 0
    assert main(["run", str(built), "-o", str(tmp_path / "o.npz")]) == 0
    text = capsys.readouterr().out
    assert text.replace("\n", "").isprintable() and r"[bold]\x1b[31m" in text
    assert "\x1b" not in (tmp_path / "r" / "index.html").read_text("utf-8")
    with np.load(tmp_path / "o.npz") as found:
        assert list(found) == ["[/]" + HOSTILE]
    assert main(["run", str(built), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"][0]["name"] == HOSTILE
    assert main(["compile", str(path), "-o", str(built), "--json"]) == 0
    document = capsys.readouterr().out
    assert document.isascii() and json.loads(document)["model"].encode("utf-8").endswith(b"\\udcff[red]\x1b[31m.onnx")


def test_pages_escape_names() -> None:
    row = FunctionRow("<script>" + HOSTILE, 1, "<i>", "seed", script="<pre>\x1b")
    text = page(CompileReport(HOSTILE + "\udcff", ["<b>"], [row]))
    text += drawing({0: Box("<script>\x1b", "<b>", (), more='"\x00')})
    assert "<script>" not in text and not any(c in text for c in "\x1b\x9b\u202e\x00")
    assert r"\x1b" in text
    text.encode("utf-8")


def test_the_trace_of_an_error_is_escaped_too(tmp_path, capsys) -> None:
    onnx.save(_model(["a", "b"], ["c"], operator=HOSTILE), tmp_path / "m.onnx")
    assert main(["compile", str(tmp_path / "m.onnx"), "--debug"]) == 1
    seen = capsys.readouterr().err
    assert "Traceback" in seen and "\x1b" not in seen


def test_what_python_prints_of_an_error_is_escaped() -> None:
    assert str(ModelError(HOSTILE)) == r"[bold]\x1b[31m\x9b2J\u202e \x07[/]"


def test_text_stays_as_it_is_where_it_is_printable() -> None:
    assert visible("größe 3×3 → [a]\n") == "größe 3×3 → [a]\n"
    assert one_line("a\n b\tc\x1b\n") == r"a b c\x1b"
    assert as_html("<a&b>\x1b") == r"&lt;a&amp;b&gt;\x1b"
