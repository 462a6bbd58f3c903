"""Every tutorial runs from top to bottom in an empty folder, with a small budget."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parent.parent / "tutorials").glob("*.ipynb"))


def test_there_is_a_tutorial() -> None:
    assert [path.name for path in TUTORIALS][:1] == ["01_first_model.ipynb"]


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if place else []) for place, path in
             enumerate(TUTORIALS)])
def test_tutorial(path, tmp_path, monkeypatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("TUTORIAL_SECONDS", "6")
    monkeypatch.setenv("TUTORIAL_ROUNDS", "2")
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path / "data"))
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources=place)
    client.execute(env=os.environ.copy())
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2, "the plots are shown"
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
