"""Nothing stands in the README and the guides that does not run: Python blocks, commands, links and names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "tutorials" / "guides").glob("*.md"))]
TEXTS = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in DOCUMENTS}
TEXT = "\n".join(TEXTS.values())


def _blocks(text: str, start: str) -> list[str]:
    return re.findall(start + r"\n(.*?)```", text, flags=re.DOTALL)


def _having(start: str) -> pytest.MarkDecorator:
    """The documents that have such blocks."""
    return pytest.mark.parametrize("document", [d for d, text in TEXTS.items() if _blocks(text, start)], ids=str)


PYTHON, RUN = "```python", "<!-- run -->\n```bash"


def test_there_are_documents_with_blocks() -> None:
    assert len(DOCUMENTS) > 8
    assert sum(len(_blocks(text, PYTHON)) for text in TEXTS.values()) >= 7


@_having(PYTHON)
def test_python_blocks_run_in_order(document: Path, tmp_path: Path) -> None:
    script = tmp_path / "document.py"
    text = "\n".join(_blocks(TEXTS[document], PYTHON))
    script.write_text(re.sub(r"trials=\d+", "trials=4", text))  # the reader's search is not the test's
    environment = {**os.environ, "MLC_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr


def test_commands_run_in_order(tmp_path: Path) -> None:
    """Those of all documents in one folder; what one has run as it stands is not run again for another."""
    lines = [line for text in TEXTS.values() for block in _blocks(text, RUN) for line in block.splitlines()]
    commands = list(dict.fromkeys(tuple(words) for line in lines if (words := shlex.split(line, comments=True))))
    assert {command[1] for command in commands} >= {"tune", "compile", "run", "bench"}
    environment = {**os.environ, "MLC_DATA_DIR": str(tmp_path / "data"),
                   "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for words in map(list, commands):
        if "--seconds" in words:  # the reader's half minute is not the test's
            words[words.index("--seconds") + 1] = "6"
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "squeezenet.so").is_file()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z][\w-]*)(?= |`|\n)", TEXT)) - {"the"}))
def test_make_targets_exist(target) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", TEXTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXTS[document])
    assert [link for link in links if not (ROOT / document.parent / link).exists()] == []


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:mlc|schedules|cost_model|tuning_logs)/[\w/.]*)`", TEXT))))
def test_rooms_and_files_exist(name) -> None:
    assert (ROOT / name).exists()


def test_every_command_and_flag_in_the_text_exists() -> None:
    from mlc.cli.main import COMMANDS, main

    mentioned = set(re.findall(r"`?mlc ([a-z]+)\b", re.sub(r"```python.*?```", "", TEXT, flags=re.DOTALL)))
    assert mentioned & {c.name for c in COMMANDS} == {c.name for c in COMMANDS}, "every command is mentioned"
    ours = re.sub(r"`pytest [^`]*`|^python -m tvm\.[^\n]*", "", TEXT, flags=re.MULTILINE)
    flags = set(re.findall(r"--[a-z][\w-]*", ours))
    import contextlib
    import io

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        for command in COMMANDS:
            main([command.name, "--help"])
        for words in ("log show", "log export", "log train", "rules list", "rules generate"):
            main([*words.split(), "--help"])
    assert {flag for flag in flags if flag not in shown.getvalue()} == set()
