"""The survey of random candidates for tensor cores: what it draws, what it calls a fault, and that it goes on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mlc.codegen.inspection import Kernel, find_nvdisasm, kernels
from tests.performance import cuda_candidates
from tests.performance.cuda_candidates import look_at, main

needs_tools = pytest.mark.skipif(
    shutil.which("nvcc") is None or find_nvdisasm() is None, reason="needs nvcc and nvdisasm")


@needs_tools
@pytest.mark.parametrize("space", cuda_candidates.SPACES)
def test_a_candidate_holds_what_it_promises(space: str) -> None:
    (row,) = look_at(space, [0])
    assert row["number"] == row["spilled"] == 0 and row["faults"] == [] and row["decisions"]


@needs_tools
def test_what_was_looked_at_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    looked = []

    def look(space: str, numbers: Sequence[int], seeds: bool) -> list[dict[str, object]]:
        assert not seeds
        looked.extend((space, number) for number in numbers)
        return [{"number": number, "spilled": 0, "faults": ["without HMMA"] if number == 3 else []}
                for number in numbers]

    monkeypatch.setattr(cuda_candidates, "look_at", look)
    for count, status in ((2, 0), (5, 1)):
        assert main(["--space", "cuda.mma", "--count", str(count), "--output", str(tmp_path)]) == status
        counts = {"candidates": count, "with faults": status, "with spilled": 0}
        assert json.loads(capsys.readouterr().out) == {"cuda.mma": counts}
    assert looked == [("cuda.mma", number) for number in range(5)]


@needs_tools
def test_candidates_compiled_together_are_what_each_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = cuda_candidates._draw("cuda.wgmma", 2, True)[1][:2]  # two seeds of one function
    compiled: list[str] = []
    monkeypatch.setattr(cuda_candidates, "kernels", lambda *given: compiled.append(given[0]) or kernels(*given))
    together = cuda_candidates._compiled(sources)
    assert len(compiled) == 1
    assert together == [cuda_candidates._alone(source) for source in sources]
    (broken,) = cuda_candidates._compiled([replace(sources[0], text=sources[0].text.replace("wgmma.", "nonesuch."))])
    assert isinstance(broken, str) and broken.startswith("not built: ")


def test_faults_are_missing_instructions_and_kernels_that_cannot_start() -> None:
    opcodes = Counter({"HMMA.16816.F32": 8, "LDSM.16.M88.4": 2})
    kernel = Kernel("main_kernel", "sm_80", 128, 1, 90, 0, 0, 65536, opcodes)
    fault = cuda_candidates._faults
    assert not list(fault([kernel], "sm_80", ("HMMA.16816.F32", "LDSM")))
    assert list(fault([kernel], "sm_80", ("HMMA", "LDGSTS"))) == ["without LDGSTS"]
    large = Kernel("main_kernel", "sm_80", 128, 0, 90, 0, 0, 190464, opcodes)
    assert list(fault([large], "sm_80", ("HMMA",))) == [
        "main_kernel: no block fits a multiprocessor (190464 bytes of shared memory)"]
