"""``mlc rules generate`` and ``mlc rules list``: what they print, and what they say of wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlc.cli.main import main


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    assert main(["rules", "generate", "-o", str(folder), "--families", "elementwise,join"]) == 0
    return folder


def _error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["rules", *words]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    return line


def test_generate_counts_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "generate", "-o", str(tmp_path), "--families", "elementwise", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["complete"] and document["rules"] == document["areas"]["pointwise"] > 3
    assert document["states"]["derived"] > document["states"]["proved"]
    assert "elementwise" in captured.err and "left" in captured.err
    assert {Path(f).name for f in document["files"]} == {"rules_pointwise.json", "report.json"}


def test_generate_says_how_a_library_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "generate", "-o", str(tmp_path), "--families", "join", "--compare", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["difference"]
    assert len(found["missing"]) > 300 and not found["proved_otherwise"]
    assert not any(name.startswith("join/") for name in (*found["new"], *found["missing"]))
    assert "give a folder" in _error(capsys, "generate", "--compare")


def test_list_shows_every_rule(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "list", "--library", str(library), "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert {"add(a, b)"} <= {r["source"] for r in rules} and all(r["proved"] for r in rules)
    assert main(["rules", "list", "--library", str(library)]) == 0
    assert f"{len(rules)} rules" in capsys.readouterr().out


def test_what_follows_and_what_is_missing(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taso = [
        {"id": 1, "src": [{"op": "concat", "in": ["?1", "?2"], "attr": {"num_inputs": 2, "axis": 0, "numdim": 2}},
                          {"op": "concat", "in": ["0.0", "?3"], "attr": {"num_inputs": 2, "axis": 0, "numdim": 2}}],
         "dst": [{"op": "concat", "in": ["?2", "?3"], "attr": {"num_inputs": 2, "axis": 0, "numdim": 2}},
                 {"op": "concat", "in": ["?1", "0.0"], "attr": {"num_inputs": 2, "axis": 0, "numdim": 2}}],
         "outputs": [["1.0", "1.0"]]},
        {"id": 2, "src": [{"op": "concat", "in": ["?1", "?2"], "attr": {"num_inputs": 2, "axis": 1, "numdim": 2}},
                          {"op": "relu", "in": ["0.0"], "attr": {}}],
         "dst": [{"op": "relu", "in": ["?1"], "attr": {}}, {"op": "relu", "in": ["?2"], "attr": {}},
                 {"op": "concat", "in": ["0.0", "1.0"], "attr": {"num_inputs": 2, "axis": 1, "numdim": 2}}],
         "outputs": [["1.0", "2.0"]]},
    ]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(taso))
    assert main(["rules", "list", "--library", str(library), "--derives", str(file), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [r["status"] for r in document["rules"]] == ["derived", "missing"]
    assert document["share"] == 0.5


def test_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no family is named nonsense" in _error(capsys, "generate", "-o", str(tmp_path), "--families", "nonsense")
    assert "must not replace the whole" in _error(capsys, "generate", "--families", "elementwise")
    assert "must not replace the whole" in _error(capsys, "generate", "--seconds", "5")
    file = tmp_path / "file"
    file.write_text("no rules")
    assert "must be a folder" in _error(capsys, "generate", "-o", str(file))
    assert "--seconds" in _error(capsys, "generate", "--seconds", "-1", "-o", str(tmp_path))
    assert "no folder of rules" in _error(capsys, "list", "--library", str(tmp_path / "none"))
    assert "must be JSON" in _error(capsys, "list", "--derives", str(file))
    assert "must be readable" in _error(capsys, "list", "--derives", str(tmp_path / "none"))
    file.write_text("3")
    assert "must be a list" in _error(capsys, "list", "--derives", str(file))


def test_a_library_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules_pointwise.json").write_text("{}")
    assert main(["rules", "list", "--library", str(tmp_path)]) == 1
    assert "write it by `mlc rules generate`" in capsys.readouterr().err
