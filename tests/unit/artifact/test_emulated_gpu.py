"""Artifacts for GPUs under TVM's own runtime, on a GPU that is this machine's CPU: memory, graphs, tensors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")
PROGRAMS = ("dense", "results", "scalars", "constant", "twins", "long_sum")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("on_emulated_gpu.py")
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("gpu"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_model_is_one_graph(facts: dict[str, Any], name: str) -> None:
    """Its kernels are started one by one in the first call, as CUDA asks for, and by a graph in each later one."""
    first, *later = facts[name]["calls"]
    assert all(call["error"] <= 1e-5 for call in (first, *later)) and first["later"] <= 1e-5
    assert first["started"] >= facts[name]["functions"] > 0 == first["graphs"]
    for call in later:
        assert (call["started"], call["graphs"], call["replayed"]) == (0, 1, first["started"])


def test_nothing_but_inputs_and_outputs_is_copied(facts: dict[str, Any]) -> None:
    assert facts["dense"]["calls"][1]["copies"] == 2
    assert facts["scalars"]["calls"][1]["copies"] == 4 + 3
    assert facts["results"]["calls"][1]["copies"] == 1 + 5


def test_tensors_on_the_gpu(facts: dict[str, Any]) -> None:
    """They are read and written there; their producer waits for the default stream, which DLPack calls 1."""
    device = facts["device"]
    assert max(device["error"], device["host"], device["other_stream"]) <= 1e-5
    assert (device["graphs"], device["started"], device["copies"]) == (1, 0, 2)
    assert device["streams"] == [1]
    shape, apart = device["refused"]
    assert shape == "input x must have shape [5, 24], got [24, 5]; reshape it"
    assert "output bias_relu" in apart or "must have memory of its own" in apart


def test_each_kernel_can_still_be_watched(facts: dict[str, Any]) -> None:
    assert facts["device"]["profiled"]


def test_a_gpu_without_memory_is_named_in_one_line(facts: dict[str, Any]) -> None:
    assert "out of memory" in facts["without_memory"] and "\n" not in facts["without_memory"]
