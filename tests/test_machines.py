"""CPUs that this one plays for ``make test-machines``: each shows what it says, and no more."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests import machines

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="plays CPUs of x86-64")


@pytest.mark.parametrize("name", [name for name, machine in machines.MACHINES.items() if machine.named])
def test_the_kernels_list_lacks_what_is_hidden(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "FOLDER", tmp_path)
    described = Path(machines.MACHINES[name].environment(name.replace("/", " "))["MLC_CPUINFO"])
    assert described.exists() == machines.MACHINES[name].listed
    if described.exists():
        shown, own = (
            {flag for line in text.splitlines() if line.startswith("flags") for flag in line.split()[2:]}
            for text in (described.read_text(), Path("/proc/cpuinfo").read_text()))
        hidden = set(machines.hidden_cpu.expand(machines.MACHINES[name].hidden))
        assert hidden and shown == own - hidden


def test_a_machine_that_was_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machines, "FOLDER", tmp_path)
    ran = []

    def run(stem: str, *_: object) -> dict[str, object]:
        ran.append(stem)
        return {"target": "-", "features": "up to avx2", "speedup_over_best_peer": 1.25, "passed": 7, "skipped": 1,
                "failures": ["tests.x::test_y"] if stem == "FMA hidden" else [], "minutes": 1.0}

    monkeypatch.setattr(machines, "run", run)
    assert machines.main(["--only", "AVX2 hidden"]) == 0
    assert machines.main(["--only", "AVX2 hidden", "--only", "FMA hidden"]) == 1
    assert ran == ["AVX2 hidden", "FMA hidden"]
    assert "FMA hidden: tests.x::test_y" in capsys.readouterr().out
