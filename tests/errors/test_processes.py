"""Processes of ours: what lies in the current folder is not imported, and what ends them leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import mlc
from mlc import subprocesses
from mlc.bench.client import Worker
from mlc.measure import LocalMeasurer, MeasureOptions
from mlc.substitution.shipped import shipped_rules
from mlc.substitution.verify import bounded_verdicts
from tests.errors.test_service import two_layers

HANG = 120.0  # seconds that nothing here comes near


@pytest.fixture
def strays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files named like modules that our processes import."""
    for name in ("resource", "tvm", "numpy", "pickle", "argparse", "json", "mlc", "multiprocessing", "selectors"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('a stray {name}.py was imported')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_measuring_worker_imports_nothing_from_the_current_folder(strays: Path) -> None:
    with LocalMeasurer(MeasureOptions(threads=1), workers=1) as measurer:
        measurer.wait_until_ready()


def test_an_engines_worker_imports_nothing_from_the_current_folder(strays: Path) -> None:
    worker = Worker({})
    try:
        assert worker.ask("nothing", timeout=HANG) is None
    finally:
        worker.close()


def test_a_prover_imports_nothing_from_the_current_folder(strays: Path) -> None:
    rule = shipped_rules()[0]
    (verdict,) = bounded_verdicts([(rule.name, [rule])])
    assert verdict.status == "proved"


@pytest.mark.parametrize("command", [
    subprocesses.command("json.tool", "data.txt"),
    subprocesses._command(["json.tool", "data.txt"], torch=False, has_flag=False),
], ids=["this Python", "3.10"])
def test_both_ways_to_start_python(command: list[str], strays: Path) -> None:
    (strays / "data.txt").write_text('{"a": 1}')
    done = subprocess.run(command, env=subprocesses.environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{", '"a":', "1", "}"]


@pytest.mark.parametrize("torch", [False, True])
def test_a_child_can_import_pytorch_where_it_asks_to(torch: bool, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import sys\nprint('torch' not in sys.modules)\n")
    environment = subprocesses.environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(subprocesses.command("child", torch=torch), env=environment, capture_output=True, text=True,
                          check=True)
    assert done.stdout.strip() == str(torch)


def test_a_command_has_tvm_without_pytorch_which_can_be_imported_afterwards() -> None:
    pytest.importorskip("torch")
    text = ("import sys; from mlc.subprocesses import import_tvm; import_tvm(); import tvm, tvm.relax; "
            "assert 'torch' not in sys.modules; import torch; from tvm.relax.frontend.torch import "
            "from_exported_program; x = tvm.runtime.from_dlpack(torch.arange(3)); print(x.numpy().sum())")
    done = subprocess.run([sys.executable, "-c", text], env=subprocesses.environment(), capture_output=True, text=True,
                          check=True)
    assert done.stdout.strip() == "3"


def test_children_find_mlc_and_keep_what_the_user_put_into_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = subprocesses.environment(MORE="1")
    assert found["PYTHONPATH"] == os.pathsep.join([str(Path(mlc.__file__).parents[1]), "/somewhere"])
    assert found["MORE"] == "1"


@pytest.fixture
def tuner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, list[psutil.Process]]]:
    """A tuning command at work, the folder for its temporary files, and its workers."""
    import onnx

    onnx.save(two_layers(3)[0], tmp_path / "model.onnx")
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = subprocesses.command("mlc.cli.main", "tune", str(tmp_path / "model.onnx"), "--trials", "100000",
                               "--no-substitutions", "--log", str(tmp_path / "log.db"))
    process = subprocess.Popen(command, env=subprocesses.environment(TMPDIR=str(folder)), text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _wait_for(lambda: any(folder.glob("mlc-measure-*/*")) or process.poll() is not None)
        yield process, folder, psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.communicate()


def _wait_for(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG
    while not fact():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_tuner_that_is_ended_leaves_nothing(
    number: signal.Signals, code: int, tuner: tuple[subprocess.Popen[str], Path, list[psutil.Process]]
) -> None:
    process, folder, workers = tuner
    assert workers
    process.send_signal(number)
    assert process.wait(HANG) == code
    if number == signal.SIGTERM:
        assert not list(folder.iterdir())
    _wait_for(lambda: not list(folder.iterdir()) and not any(worker.is_running() for worker in workers))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seconds", [2.0, 3.0, 4.0, 5.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_compile_that_is_ended_makes_nothing(number: signal.Signals, seconds: float, tmp_path: Path) -> None:
    """Wherever it is at work: in a function that TVM calls too."""
    folder, output = tmp_path / "temporary", tmp_path / "model.so"
    folder.mkdir()
    command = subprocesses.command("mlc.cli.main", "compile", "light:resnet50", "-o", str(output))
    process = subprocess.Popen(command, env=subprocesses.environment(TMPDIR=str(folder)), text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(number)
        assert process.wait(HANG) == (143 if number == signal.SIGTERM else 1)
        assert process.stderr is not None
        said = [line for line in process.stderr.read().splitlines() if "error" in line]
        assert said == [f"mlc: error: {'terminated' if number == signal.SIGTERM else 'interrupted'}"]
        assert not output.exists()
        assert not list(folder.iterdir())
    finally:
        process.kill()
        process.communicate()


def test_an_interrupt_in_what_tvm_calls_is_one_outside_as_well() -> None:
    import tvm_ffi

    from mlc.target import resolve

    def interrupted() -> None:
        raise KeyboardInterrupt("terminated")

    assert resolve("native").tvm
    with pytest.raises(KeyboardInterrupt, match=r"^terminated$"):
        tvm_ffi.convert(interrupted)()


def test_nothing_but_the_command_handles_sigterm() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    from mlc.cli.main import main

    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
