"""The command line as a script meets it: exit codes, one JSON document, one line for an error, a quick start."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from mlc.cli.main import COMMANDS, main
from mlc.cli.outcome import Outcome

HEAVY = ("tvm", "tvm_ffi", "numpy", "onnx", "torch", "xgboost", "matplotlib", "rich", "scipy")


def _run(*words: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mlc.cli.main", *words], capture_output=True, text=True, check=False)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom mlc.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stderr
    assert all(command.name in done.stdout for command in COMMANDS)


def test_help_is_quick() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert _run("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor time, whatever else the machine does meanwhile
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_every_command_has_help_and_the_common_options(command, capsys) -> None:
    assert main([command.name, "--help"]) == 0
    text = capsys.readouterr().out
    if command.name in ("jobs", "log", "rules"):  # the options belong to their own sub-commands
        assert main([command.name, "show", "--help"]) == 0
        text = capsys.readouterr().out
    assert "--json" in text and "--debug" in text


def test_version(capsys) -> None:
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mlc {version('mlc')}\n"


def test_json_is_one_document_without_nan(capsys, monkeypatch) -> None:
    document = {"inf": float("inf"), "nested": [{"nan": float("nan"), "x": 1.5}], "tuple": (1, 2)}
    _replace(monkeypatch, "targets", lambda args: Outcome(document))
    assert main(["targets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"inf": None, "nested": [{"nan": None, "x": 1.5}], "tuple": [1, 2]}


def test_an_outcome_carries_its_exit_code(capsys, monkeypatch) -> None:
    _replace(monkeypatch, "targets", lambda args: Outcome({"ok": False}, exit_code=1))
    assert main(["targets", "--json"]) == 1


def _replace(monkeypatch, name: str, execute) -> None:
    import dataclasses

    from mlc.cli import main as _  # noqa: F401

    module = sys.modules["mlc.cli.main"]
    commands = tuple(dataclasses.replace(c, execute=execute) if c.name == name else c for c in COMMANDS)
    monkeypatch.setattr(module, "COMMANDS", commands)
