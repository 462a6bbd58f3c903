"""Nothing stands in the README that does not run: its Python blocks, its commands, its links and its names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(pattern: str) -> list[str]:
    return re.findall(pattern + r"```\w+\n(.*?)```", TEXT, flags=re.DOTALL)


def test_python_blocks_run_in_order(tmp_path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) >= 4
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_run_in_order(tmp_path) -> None:
    lines = [line for block in _blocks(r"<!-- run -->\n") for line in block.splitlines() if line.strip()]
    assert {shlex.split(line, comments=True)[1] for line in lines} >= {"tune", "compile", "run", "bench", "log"}
    environment = {**os.environ, "MLC_DATA_DIR": str(tmp_path / "data"),
                   "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for line in lines:
        words = shlex.split(line, comments=True)
        if "--seconds" in words:  # the reader's half minute is not the test's
            words[words.index("--seconds") + 1] = "6"
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "squeezenet.so").is_file()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z][\w-]*)(?= |`|\n)", TEXT)) - {"the"}))
def test_make_targets_exist(target) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT))
def test_links_lead_somewhere(link) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:mlc|schedules|cost_model|tuning_logs)/[\w/.]*)`", TEXT))))
def test_rooms_and_files_exist(name) -> None:
    assert (ROOT / name).exists()


def test_every_command_and_flag_in_the_text_exists() -> None:
    from mlc.cli.main import COMMANDS, main

    mentioned = set(re.findall(r"`?mlc ([a-z]+)\b", re.sub(r"```python.*?```", "", TEXT, flags=re.DOTALL)))
    assert mentioned & {c.name for c in COMMANDS} == {c.name for c in COMMANDS}, "every command is mentioned"
    flags = {flag for flag in re.findall(r"--[a-z][\w-]*", TEXT)}
    import contextlib
    import io

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        for command in COMMANDS:
            main([command.name, "--help"])
        for words in ("log show", "log export", "log train", "rules list", "rules generate"):
            main([*words.split(), "--help"])
    assert {flag for flag in flags if flag not in shown.getvalue()} == set()
