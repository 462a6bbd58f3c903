"""The GPU of this machine, by a driver that stands in for NVIDIA's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from mlc import gpu
from mlc import target as target_module
from mlc.measure import local_executor
from mlc.target import resolve
from schedules.machine import GPUS, gpu_machine

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

#: an H100 with fewer multiprocessors than the largest
ATTRIBUTES = {13: 1755000, 16: 114, 36: 1593000, 37: 5120, 38: 52428800, 75: 9, 76: 0}


def driver(folder: Path, init: int = 0, devices: int = 1) -> ctypes.CDLL:
    cases = "".join(f"case {number}: *value = {value}; return 0;" for number, value in ATTRIBUTES.items())
    text = f"""#include <stddef.h>
    #include <string.h>
    extern "C" int cuInit(unsigned) {{ return {init}; }}
    extern "C" int cuDeviceGetCount(int* count) {{ *count = {devices}; return 0; }}
    extern "C" int cuDeviceGetName(char* name, int size, int) {{ strncpy(name, "NVIDIA H100 PCIe", size); return 0; }}
    extern "C" int cuDeviceTotalMem_v2(size_t* bytes, int) {{ *bytes = 24ull << 30; return {int(devices > 1)}; }}
    extern "C" int cuDeviceGetAttribute(int* value, int which, int) {{ switch (which) {{ {cases} }} return 1; }}"""
    (folder / "driver.cc").write_text(text)
    library = folder / f"driver{init}{devices}.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, folder / "driver.cc"], check=True)
    return ctypes.CDLL(str(library))


def test_cuda_is_the_gpu_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = gpu.gpus(driver(tmp_path))
    assert (found.name, found.arch) == ("NVIDIA H100 PCIe", "sm_90a")
    assert (found.multiprocessors, found.l2_bytes) == (114, 50 << 20)
    monkeypatch.setattr(gpu, "find_gpu", lambda: found)
    target_module._resolve.cache_clear()
    target = resolve("cuda")
    assert target.canonical == "cuda/sm_90a", "figures of one GPU do not change what a schedule means"
    here, sheet = gpu_machine(target.tvm), GPUS["90"]
    assert (here.multiprocessors, here.hz, here.l2_bytes) == (114, 1.755e9, 50 << 20)
    assert here.memory_rate == pytest.approx(2.039e12, rel=1e-3)
    assert here.flops < sheet.flops and here.tensor_flops() < sheet.tensor_flops()
    assert here.shared_bytes == sheet.shared_bytes
    assert gpu_machine(resolve("cuda:sm_80").tvm) == GPUS["80"], "an architecture stands for its largest part"
    target_module._resolve.cache_clear()


def test_as_many_workers_compile_as_the_memory_of_the_gpu_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_executor, "physical_cores", lambda: 64)
    for devices, workers in ((1, 12), (2, 32)):  # the second driver does not say
        found, *_ = gpu.gpus(driver(tmp_path, devices=devices))
        monkeypatch.setattr(local_executor, "find_gpu", lambda found=found: found)
        assert local_executor.build_workers("cuda") == workers
    assert local_executor.build_workers() == 8


def test_without_a_gpu_that_answers_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.gpus(driver(tmp_path, init=100)) == []
    assert gpu.gpus(driver(tmp_path, devices=0)) == []
    monkeypatch.setattr(gpu, "find_gpu", lambda: None)
    target_module._resolve.cache_clear()
    assert resolve("cuda").canonical == "cuda/sm_80"
    target_module._resolve.cache_clear()


def test_how_many_blocks_a_multiprocessor_holds() -> None:
    """NVIDIA's occupancy calculator, for sm_80 and sm_90."""
    ampere, hopper = GPUS["80"], GPUS["90"]
    assert ampere.resident(256, 128, 49152) == 2  # registers
    assert ampere.resident(128, 32, 81920) == 2  # shared memory
    assert hopper.resident(128, 32, 81920) == 2
    assert hopper.resident(128, 32, 73728) == 3
    assert ampere.resident(1024, 32, 0) == 2  # threads
    assert ampere.resident(32, 16, 0) == 32  # blocks
    assert ampere.resident(512, 168, 0) == 0  # 86,016 registers
    assert ampere.resident(32, 256, 0) == 0  # no thread has so many
