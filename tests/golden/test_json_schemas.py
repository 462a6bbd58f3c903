"""The shape of each command's ``--json`` document: names and types, which scripts rely on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from golden_files import Golden
from onnx import TensorProto, helper, numpy_helper

from mlc.cli.main import main

#: objects whose names are data: a space's knobs, kinds of failures, tensors and rules
_MAPS = ("decisions", "failures", "inputs", "rules")
_TYPES = {str: "text", int: "number", float: "number", bool: "true or false", type(None): "null"}


def _schema(value: Any) -> Any:
    """The document with its leaves' types; a list is what all of its items have in common and apart."""
    if isinstance(value, dict):
        return {
            name: "map" if name in _MAPS and isinstance(item, dict) else _schema(item)
            for name, item in sorted(value.items())
        }
    if isinstance(value, list):
        return [_merged([_schema(item) for item in value])] if value else []
    return _TYPES[type(value)]


def _merged(items: list[Any]) -> Any:
    """One schema of several; names that not all have end in a question mark."""
    if all(isinstance(item, list) for item in items):
        inner = [schema for item in items for schema in item]
        return [_merged(inner)] if inner else []
    if not all(isinstance(item, dict) for item in items):
        return " or ".join(sorted({str(item) for item in items}))
    names = sorted({name.removesuffix("?") for item in items for name in item})
    merged = {}
    for name in names:
        found = [item.get(name, item.get(f"{name}?")) for item in items]
        known = [each for each in found if each is not None]
        optional = len(known) < len(items) or any(f"{name}?" in item for item in items)
        merged[f"{name}?" if optional else name] = _merged(known)
    return merged


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with ``small.onnx``, one dense layer, and a jobs file."""
    folder = tmp_path_factory.mktemp("schemas")
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 32)).astype("float32"), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    border = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
              for name, shape in (("x", [16, 64]), ("y", [16, 32]))]
    graph = helper.make_graph(nodes, "small", border[:1], border[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
              folder / "small.onnx")
    (folder / "jobs.toml").write_text('trials = 4\nlog = "jobs.db"\nmodels = ["small.onnx"]\ntargets = ["native"]\n')
    return folder


#: in this order: later ones read what earlier ones write
_COMMANDS = {
    "tune": "tune small.onnx --trials 4 --log log.db",
    "compile": "compile small.onnx --log log.db -o small.so --explain explained --report report",
    "compile-bundle": "compile small.onnx --target x86-64,x86-64-v2 -o bundle.so",
    "run": "run small.so --repeat 2",
    "bench": "bench small.onnx --log log.db --against onnxruntime",
    "log-show": "log show --log log.db",
    "log-show-task": "log show --log log.db --task fused",
    "log-check": "log check log.db",
    "log-export": "log export log.jsonl --log log.db",
    "tune-jobs-plan": "tune jobs.toml --dry-run",
    "tune-jobs": "tune jobs.toml",
    "jobs-show": "jobs show jobs.toml",
    "rules-list": "rules list",
    "targets": "targets",
    "error": "compile missing.onnx",
}


def test_schemas(golden: Golden, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                 ) -> None:
    monkeypatch.chdir(folder)
    for name, line in _COMMANDS.items():
        capsys.readouterr()
        code = main([*line.split(), "--json"])
        printed = capsys.readouterr()
        assert code == (1 if name == "error" else 0), f"{line}: {printed.err}"
        document = json.loads(printed.out)
        if name == "targets":
            document["targets"][0]["attrs"].pop("mattr", None)  # of a CPU that hides features
        golden(f"schemas/{name}.json", json.dumps(_schema(document), indent=1))
