"""What is installed is what is needed: the wheel's content, its pins, its import cost, and the Makefile's first run."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """A wheel of the tracked files, built with the setuptools that is installed."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    probe = source / "tuning_logs" / "x86-64-v3"
    probe.mkdir(exist_ok=True)
    (probe / "probe.jsonl").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "-qq", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)],
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("mlc-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_packages_and_nothing_else(wheel) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"mlc", "schedules", "cost_model", "tuning_logs"}
    names = set(wheel.namelist())
    command = ["git", "ls-files", "mlc", "schedules", "cost_model"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    missing = {name for name in tracked.stdout.split() if name.endswith(".py")} - names
    assert missing == set()
    assert "mlc/py.typed" in names


def test_shipped_logs_are_packaged(wheel) -> None:
    command = ["git", "ls-files", "tuning_logs"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.split()) <= set(wheel.namelist())
    assert "tuning_logs/x86-64-v3/probe.jsonl" in wheel.namelist()


def test_the_wheel_has_its_licence_and_its_command(wheel) -> None:
    (entry,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    assert "mlc = mlc.cli.main:main" in wheel.read(entry).decode()
    (licence,) = (n for n in wheel.namelist() if n.endswith("LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_tvm_and_its_ffi_are_pinned_exactly_and_installed_so() -> None:
    from mlc.installation import pins

    assert {p.package: p.ok for p in pins()} == {"apache-tvm": True, "apache-tvm-ffi": True}


def test_every_extra_can_be_resolved_by_name() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = dict(config["options.extras_require"])
    assert extras.keys() >= {"bench", "torch", "dev"}
    for lines in extras.values():
        for line in filter(None, lines.splitlines()):
            assert re.fullmatch(r"[\w.-]+(\[\w+\])?\s*(>=|==)\s*[\d.]+(,<[\d.]+)?", line.strip()), line


def test_importing_mlc_is_cheap() -> None:
    code = "import sys, mlc; print([m for m in ('tvm', 'numpy', 'onnx', 'torch', 'xgboost') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_module_can_be_imported_and_none_pulls_in_tvms_slow_one() -> None:
    """``tvm.s_tir.tensor_intrin`` takes 20 seconds to import."""
    code = (
        "import sys, importlib, pkgutil, mlc, schedules, cost_model, tuning_logs\n"
        "for package in (mlc, schedules, cost_model, tuning_logs):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "assert len([m for m in sys.modules if m.startswith('mlc.')]) > 60\n"
        "assert 'tvm' in sys.modules and 'tvm.s_tir.tensor_intrin' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["test", "demo", "bench", "test-all", "shipped-logs"])
def test_make_installs_what_a_target_needs_once(target, tmp_path) -> None:
    """In a checkout without an environment the plan begins with making one; with a fresh stamp it doesn't."""
    venv = tmp_path / "venv"
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={venv}"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m venv" in first and "--editable '.[dev,bench]'" in first
    assert first.index("install torch==") < first.index("--editable")
    venv.mkdir()
    (venv / ".installed").touch()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pip" not in again


def test_ci_runs_what_the_readme_names() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make --no-print-directory test" in script.read_text()
    assert "make test " in (ROOT / "README.md").read_text()
