"""Every wrong command line ends in one line that says what must hold, and in the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mlc.cli.main import COMMANDS, main
from mlc.errors import InstallationError, MlcError

USAGE = [
    ([], "a command is needed"),
    (["nope"], "invalid choice: 'nope'"),
    (["compile"], "required: MODEL"),
    (["compile", "m.onnx", "--tagret", "native"], "--tagret"),
    (["run", "m.so", "--repeat", "0"], "must be at least 1, got 0"),
    (["run", "m.so", "--repeat", "many"], "must be a whole number, got 'many'"),
    (["run", "m.so", "--input", "x.npy"], "must look like NAME=FILE.npy, got 'x.npy'"),
    (["run", "m.so", "--input", "x=a.npy", "--input", "x=b.npy"], "came twice"),
    (["run", "m.so", "--seed", "-1"], "must be at least 0, got -1"),
    (["targets", "llmv"], "did you mean llvm?"),
    (["targets", "llvm -mcpu=pentium99"], "got 'pentium99'"),
    (["targets", "cuda:sm_12"], "got 'sm_12'"),
    (["compile", "light:squezenet"], "squeezenet"),
]


@pytest.mark.parametrize(("words", "says"), USAGE, ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "")
def test_usage_errors_exit_with_2_and_one_line(words, says, capsys) -> None:
    assert main(words) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("mlc: error: ") and seen.err.count("\n") == 1
    assert says in seen.err


@pytest.mark.parametrize("command", ["compile", "tune", "bench"])
def test_a_missing_model(command, capsys) -> None:
    assert main([command, "missing.onnx"]) == 1
    line = capsys.readouterr().err
    assert "missing.onnx does not exist" in line and "light:squeezenet" in line


def test_a_folder_is_no_model(tmp_path, capsys) -> None:
    assert main(["compile", str(tmp_path)]) == 1
    assert "is a folder" in capsys.readouterr().err


def test_a_near_name_is_suggested(capsys) -> None:
    assert main(["compile", "bert_base"]) == 1
    assert "did you mean bert-base?" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "says"), [
    (None, "is a directory; give a file"), (b"hello", "must be an SQLite database"),
    (b"SQLite format 3\0" + b"\1" * 9000, "mlc log check"),
])  # fmt: skip
def test_an_unusable_log_is_told_before_the_model_is_prepared(tmp_path, capsys, monkeypatch, content, says) -> None:
    monkeypatch.setattr("mlc.api.tune", lambda *args, **options: pytest.fail("the model was prepared"))
    monkeypatch.setattr("mlc.measure.machine.load_warning", lambda: pytest.fail("the machine was looked at"))
    log = tmp_path / "log.db"
    log.mkdir() if content is None else log.write_bytes(content)
    assert main(["tune", "light:squeezenet", "--log", str(log)]) == 1
    line = capsys.readouterr().err
    assert says in line and line.count("\n") == 1


def test_the_output_folder_must_exist_before_work_starts(tmp_path, capsys) -> None:
    assert main(["compile", "light:squeezenet", "-o", str(tmp_path / "none" / "x.so")]) == 2
    assert "mkdir -p" in capsys.readouterr().err


def test_errors_are_the_json_document_too(capsys) -> None:
    assert main(["compile", "missing.onnx", "--json"]) == 1
    seen = capsys.readouterr()
    error = json.loads(seen.out)["error"]
    assert error["kind"] == "ModelError"
    assert seen.err == f"mlc: error: {error['message']}\n"


def test_debug_shows_the_trace_and_nothing_else_does(capsys) -> None:
    main(["compile", "missing.onnx"])
    assert "Traceback" not in capsys.readouterr().err
    main(["compile", "missing.onnx", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_debug_from_the_environment(capsys, monkeypatch) -> None:
    monkeypatch.setenv("MLC_DEBUG", "1")
    main(["compile", "missing.onnx"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code", "says"), [
    (ValueError("first line\nlast line"), 1, "ValueError: last line; this is a defect in mlc"),
    (MlcError("x must hold, got y; do z"), 1, "x must hold, got y; do z"),
    (KeyboardInterrupt("stopped; the log is kept"), 1, "stopped; the log is kept"),
    (PermissionError(13, "Permission denied", "/x"), 1, "Permission denied"),
])
def test_whatever_is_raised_becomes_one_line(error, code, says, capsys, monkeypatch) -> None:
    import dataclasses

    def fails(args):
        raise error

    replaced = tuple(dataclasses.replace(c, execute=fails) if c.name == "targets" else c for c in COMMANDS)
    monkeypatch.setattr(sys.modules["mlc.cli.main"], "COMMANDS", replaced)
    assert main(["targets"]) == code
    seen = capsys.readouterr().err
    assert says in seen and seen.count("\n") == 1


def test_wrong_versions_are_told_before_tvm_is_imported(monkeypatch) -> None:
    """With the wrong pair, importing TVM may crash: so the line must come from metadata alone."""
    code = (
        "import sys, importlib.metadata as m\n"
        "real = m.version\n"
        "m.version = lambda name: '0.1.15.post2' if name == 'apache-tvm-ffi' else real(name)\n"
        "from mlc.cli.main import main\n"
        "code = main(['targets'])\n"
        "assert 'tvm' not in sys.modules and 'tvm_ffi' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "apache-tvm-ffi 0.1.15.post2" in done.stderr and "pip install apache-tvm==" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_package_is_named(monkeypatch) -> None:
    from mlc import installation

    monkeypatch.setattr(installation, "installed", lambda name: None)
    with pytest.raises(InstallationError, match="apache-tvm missing, apache-tvm-ffi missing; run `pip install"):
        installation.check_pins()


def test_a_closed_pipe_is_quiet() -> None:
    line = f"{sys.executable} -m mlc.cli.main targets --json | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "{"
    assert done.stderr == ""
