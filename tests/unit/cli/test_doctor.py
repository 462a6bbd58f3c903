"""``mlc doctor`` says what is wrong and exits with 1 for it; nothing wrong is 0."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import resource
import signal
import subprocess
import sys

import pytest

from mlc.calibration import Calibration, identity, read, write
from mlc.cli import probes
from mlc.cli.main import main
from mlc.cli.probes import Finding, cpu_findings
from mlc.cpu import HostCpu, host_flags
from mlc.measure import calibrate as calibrate_module
from mlc.measure.calibrate import Reading
from mlc.target import resolve
from schedules.machine import cpu_machine

ZEN2 = {"sse4.2", "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "popcnt", "rdpru", "wbnoinvd", "mwaitx"}
ZEN2_CPU = HostCpu(
    "x86_64", "znver2", frozenset({"sse4_2", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "popcnt", "movbe"}))


def _doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlc.cli.main", "doctor", "--json"], capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.alone
def test_this_installation_is_sound_and_told_in_three_seconds() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _doctor()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # whatever else the machine does
    document = json.loads(done.stdout)
    assert [f for f in document["findings"] if f["state"] == "wrong"] == []
    assert done.returncode == 0 and document["ok"]
    names = {f["name"] for f in document["findings"]}
    assert names >= {"python", "mlc", "apache-tvm", "apache-tvm-ffi", "llvm", "xgboost", "onnx", "target native",
                     "threads", "nvcc", "cuda driver", "your log", "shipped logs", "native code", "linker"}
    assert took < 3


def test_an_unwritable_data_folder_is_wrong(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = _doctor(MLC_DATA_DIR=str(blocked))
    finding = next(f for f in json.loads(done.stdout)["findings"] if f["state"] == "wrong")
    assert done.returncode == 1
    assert finding["name"] == "your log" and "MLC_DATA_DIR" in finding["remedy"]


def test_features_that_a_virtual_machine_masks_are_wrong() -> None:
    found = list(cpu_findings(ZEN2 | {"avx512f", "avx512vl"}, ZEN2_CPU))
    assert [f.state for f in found] == ["wrong"]
    assert "avx512f, avx512vl" in found[0].value and "x86-64-v3" in found[0].remedy


def test_features_that_code_never_uses_by_itself_may_be_masked() -> None:
    found = list(cpu_findings(ZEN2, ZEN2_CPU))
    assert [f.state for f in found] == ["ok"]
    assert "up to avx2" in found[0].value


def test_without_cpuinfo_the_cpu_itself_is_asked() -> None:
    asked = HostCpu("x86_64", "znver2", None, dict.fromkeys(ZEN2, True))
    (finding,) = cpu_findings(ZEN2, asked)
    assert finding.state == "ok" and "was asked" in finding.value
    assert [f.state for f in cpu_findings(ZEN2 | {"avx512f"}, asked)] == ["wrong"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="hides features of x86")
@pytest.mark.parametrize("hidden", ["avx512", "avx", "fma", "amx bmi"])
def test_nothing_is_wrong_on_a_machine_that_hides_features(hidden: str, tmp_path) -> None:
    listed = tmp_path / "cpuinfo"
    shown = (flag for flag in host_flags() or () if not any(flag.startswith(word) for word in hidden.split()))
    listed.write_text(f"model name\t: A virtual CPU\nflags\t\t: {' '.join(shown)}\n")
    done = _doctor(MLC_CPUINFO=str(listed))
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stdout


def test_an_illegal_instruction_is_a_finding_and_not_a_crash(monkeypatch) -> None:
    import tvm  # noqa: F401

    def illegal() -> None:
        faulthandler.disable()  # in the forked child: pytest's would print a trace
        os.kill(os.getpid(), signal.SIGILL)

    monkeypatch.setattr(probes, "_native_sum", illegal)
    (finding,) = probes._runs()
    assert finding.state == "wrong" and "SIGILL" in finding.value


@pytest.mark.parametrize(("answer", "says"), [(lambda: False, "wrong result"), (lambda: 1 / 0, "could not be built")])
def test_a_failing_self_test_is_a_finding(answer, says, monkeypatch) -> None:
    monkeypatch.setattr(probes, "_native_sum", answer)
    (finding,) = probes._runs()
    assert finding.state == "wrong" and says in finding.value


def test_the_clash_with_another_package_is_wrong(monkeypatch) -> None:
    monkeypatch.setattr(probes, "installed", lambda name: "0.1.2" if name == "mlc-python" else None)
    (finding,) = probes._clash()
    assert finding.state == "wrong" and "pip uninstall mlc-python" in finding.remedy


def test_after_a_wrong_version_tvm_is_not_touched(monkeypatch) -> None:
    def bad() -> list[Finding]:
        return [Finding("apache-tvm-ffi", "wrong", "0.1.15", "run pip")]

    monkeypatch.setattr(probes, "_packages", bad)
    monkeypatch.setattr(probes, "_native", lambda: pytest.fail("TVM was looked at"))
    findings = probes.examine()
    assert findings[-1].name == "the rest" and "not looked at" in findings[-1].value


def test_a_probe_that_raises_is_a_finding(monkeypatch) -> None:
    def _breaks() -> list[Finding]:
        raise RuntimeError("boom")

    (finding,) = probes._guarded(_breaks)
    assert (finding.name, finding.state) == ("breaks", "wrong") and "boom" in finding.value


# -- calibration


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Runs ``mlc doctor`` with measurements that are made up; gives the exit code, what was printed, and the data."""
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(probes, "_python", list)
    for slow in ("_runs", "_packages", "_linker", "_cuda"):
        monkeypatch.setattr(probes, slow, lambda: iter(()))

    def run(capsys, *arguments: str, found=(), busy: str = "") -> tuple[int, str]:
        kept = Calibration(identity(), {r.name: r.value for r in found if r.confirmed and r.name != "wake"})
        monkeypatch.setattr(calibrate_module, "calibrate", lambda _target: (kept, list(found), busy))
        code = main(["doctor", *arguments])
        return code, capsys.readouterr().out

    return run


READINGS = [Reading("ghz", 3.21), Reading("fma", 1.0), Reading("memory", 77.0, confirmed=False), Reading("wake", 51.0)]


def test_calibration_is_kept_and_shown_beside_what_is_described(measured, capsys) -> None:
    described = cpu_machine(resolve("native").tvm).hz / 1e9
    code, text = measured(capsys, "--calibrate", "--json", found=READINGS)
    document = json.loads(text)
    assert code == 0 and document["calibrated"] and "memory" in document["note"]
    figures = {figure["name"]: figure for figure in document["machine"]}
    assert (figures["ghz"]["described"], figures["ghz"]["measured"], figures["ghz"]["unit"]) == (described, 3.21, "GHz")
    assert figures["l2rate"]["measured"] is None and figures["l2rate"]["described"] > 0
    assert figures["wake"]["described"] is None and figures["wake"]["measured"] == 51.0
    assert dict(read()[0].facts) == {"ghz": 3.21, "fma": 1.0}
    code, text = measured(capsys, "--json")
    later = {figure["name"]: figure["measured"] for figure in json.loads(text)["machine"]}
    assert code == 0 and later["ghz"] == 3.21 and later["memory"] is None and "wake" not in later
    _, text = measured(capsys)
    row = next(line for line in text.splitlines() if "clock under vector load" in line)
    assert f"{described:.3g}" in row and "3.21" in row and "GHz" in row
    assert "ghz=3.2,fma=1" in text


def test_what_was_measured_on_a_busy_machine_is_shown_but_not_kept(measured, capsys) -> None:
    code, text = measured(capsys, "--calibrate", found=READINGS, busy="1.9 of its 2 CPUs are busy")
    assert code == 1 and "3.21" in text
    assert "nothing of it is kept: 1.9 of its 2 CPUs are busy" in text
    assert read() == (None, "")


def test_a_damaged_calibration_is_wrong_until_it_is_measured_anew(measured, capsys) -> None:
    path = write(Calibration(identity(), {"ghz": 3.0}))
    path.write_text(path.read_text()[:-9])
    code, text = measured(capsys, "--json")
    finding = next(f for f in json.loads(text)["findings"] if f["name"] == "calibration")
    assert code == 1 and finding["state"] == "wrong" and "mlc doctor --calibrate" in finding["value"]
    code, _ = measured(capsys, "--calibrate", found=READINGS)
    assert code == 0 and read()[0] is not None


def test_a_data_folder_that_cannot_be_written_is_one_line(measured, capsys, monkeypatch, tmp_path) -> None:
    (tmp_path / "calibrations").write_text("a file where a folder should be")
    assert measured(capsys, "--calibrate", found=READINGS)[0] == 1
