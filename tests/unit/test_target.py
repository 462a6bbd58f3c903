"""Friendly target names, their keys, and what is refused."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import tvm

from mlc import target as target_module
from mlc.cli.main import main
from mlc.codegen.cuda import architectures
from mlc.errors import TargetError
from mlc.target import FRIENDLY, resolve, several, split
from schedules import intrin, machine
from schedules.machine import GPUS, cpu_machine, gpu_machine


@pytest.mark.parametrize("name", FRIENDLY)
def test_every_listed_name_is_a_tvm_target(name: str) -> None:
    assert isinstance(resolve(name).tvm, tvm.target.Target)


@pytest.mark.parametrize(
    ("name", "width", "registers"), [("x86-64", 16, 16), ("x86-64-v3", 32, 16), ("x86-64-v4", 64, 32)]
)
def test_vector_registers_follow_the_level(name: str, width: int, registers: int) -> None:
    found = cpu_machine(resolve(name, threads=3).tvm)
    assert (found.cores, found.vector_bytes, found.vector_registers) == (3, width, registers)


@pytest.mark.parametrize(("name", "features", "dots", "fma", "last_level"), [
    ("aarch64", "", False, 2.0, 16 << 20), ("aarch64:cortex-a72", "crc", False, 1.0, 1 << 20),
    ("aarch64:cortex-a76", "dotprod", True, 2.0, 2 << 20),
    ("aarch64:neoverse-v1", "dotprod i8mm bf16", True, 4.0, 32 << 20),
    ("aarch64:cortex-a78", "dotprod", True, 2.0, 16 << 20),  # not in the list, but LLVM knows it
])
def test_arm_targets_have_neon_and_what_their_cpu_adds(
    name: str, features: str, dots: bool, fma: float, last_level: int
) -> None:
    target = resolve(name, threads=4)
    enabled = {str(f) for f in tvm.target.codegen.llvm_get_cpu_features(target.tvm)}
    assert {"neon", *features.split()} <= enabled
    machine = cpu_machine(target.tvm)
    assert (machine.vector_bytes, machine.vector_registers, machine.lanes()) == (16, 32, 4)
    assert (machine.fma_per_cycle, machine.l3_bytes, machine.cores) == (fma, last_level, 4)
    assert machine.dot_per_cycle == (fma if dots else 0.0)
    assert target.architecture == "aarch64" and target.kind == "llvm"
    assert target.canonical == f"llvm/{name.partition(':')[2] or 'generic'}/4/mtriple=aarch64-linux-gnu"


def test_an_arm_cpu_that_llvm_does_not_know_is_refused_with_the_nearest() -> None:
    with pytest.raises(TargetError, match=r"knows for aarch64-linux-gnu, got 'cortex-a67'; did you mean .*cortex-a"):
        resolve("aarch64:cortex-a67")


def test_code_runs_on_the_architecture_that_the_target_says() -> None:
    here = platform.machine()
    assert resolve("native").architecture == resolve("cuda:sm_90").architecture == here
    assert resolve("llvm -mtriple=riscv64-linux-gnu").architecture == "riscv64"


def test_named_targets_mean_the_same_everywhere_and_native_carries_this_machines_caches(monkeypatch) -> None:
    before = resolve("x86-64-v3", threads=3).attrs
    monkeypatch.setattr(machine, "native_caches", lambda: "l1=64K,l2=2M,l3=48M")
    target_module._resolve.cache_clear()
    native = resolve("native", threads=3)
    assert resolve("x86-64-v3", threads=3).attrs == before
    plain, found = cpu_machine(resolve("x86-64-v3", threads=3).tvm), cpu_machine(native.tvm)
    assert (plain.l1_bytes, plain.l2_bytes, plain.l3_bytes) == (32 << 10, 512 << 10, 16 << 20)
    assert (found.l1_bytes, found.l2_bytes, found.l3_bytes) == (64 << 10, 2 << 20, 48 << 20)
    target_module._resolve.cache_clear()
    assert "l1=" not in native.canonical


def test_caches_may_be_spelled_out_and_other_models_are_left_alone() -> None:
    spelled = cpu_machine(resolve("llvm -mcpu=znver3 -model=l2=256K,l3=8M").tvm)
    assert (spelled.l1_bytes, spelled.l2_bytes, spelled.l3_bytes) == (32 << 10, 256 << 10, 8 << 20)
    assert cpu_machine(resolve("llvm -mcpu=znver3 -model=xl2=256Kb").tvm).l2_bytes == 512 << 10


def test_caches_are_read_from_sysfs_data_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    entries = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "1024K"), ("3", "Unified", "32M"),
               ("4", "Unified", "64M"), ("2", "Unified", "?")]
    for number, texts in enumerate(entries):
        folder = tmp_path / "cpu3" / "cache" / f"index{number}"
        folder.mkdir(parents=True)
        for name, text in zip(("level", "type", "size"), texts, strict=True):
            (folder / name).write_text(f"{text}\n")
    assert machine.native_caches(tmp_path) == "l1=48K,l2=1024K,l3=32768K"


def test_without_sysfs_the_c_library_is_asked(tmp_path: Path, monkeypatch) -> None:
    sizes = {"SC_LEVEL1_DCACHE_SIZE": 32768, "SC_LEVEL2_CACHE_SIZE": 0}

    def sysconf(name: str) -> int:
        if name not in sizes:
            raise ValueError("unrecognized configuration name")
        return sizes[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert machine.native_caches(tmp_path) == "l1=32K"


def test_options_are_part_of_the_key() -> None:
    assert resolve("llvm -mcpu=znver3 -num-cores=4").canonical == "llvm/znver3/4"
    assert resolve("x86-64-v3", threads=2).canonical == "llvm/x86-64-v3/2"
    plain, tuned = resolve("llvm -mcpu=znver3"), resolve("llvm -mcpu=znver3 -opt-level=2 -mattr=+avx512f")
    assert tuned.canonical.startswith(plain.canonical) and tuned.canonical != plain.canonical
    assert resolve("cuda -arch=sm_90").canonical == resolve("cuda:sm_90").canonical == "cuda/sm_90"


def test_several_architectures_have_what_each_has() -> None:
    both = resolve("cuda:sm_90a,sm_80")
    assert both.canonical == resolve("cuda -arch=sm_80,sm_90a").canonical == "cuda/sm_80,sm_90a"
    assert gpu_machine(both.tvm).shared_bytes == GPUS["80"].shared_bytes
    assert gpu_machine(resolve("cuda:sm_80,sm_120").tvm).shared_bytes == GPUS["120"].shared_bytes
    assert architectures(both.tvm) == ("sm_80", "sm_90a")
    assert intrin.select("mma_f16", both.tvm) == "mlc.mma_f16"
    assert intrin.select("mma_f16", resolve("cuda:sm_75,sm_90").tvm) is None


def test_several_gpus_are_a_bundle_or_share_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever wants the instructions of each asks for a bundle, and is told so."""
    assert [each.canonical for each in several("cuda:sm_80,cuda:sm_90a")] == ["cuda/sm_80", "cuda/sm_90a"]
    assert [each.canonical for each in several("cuda:sm_80,sm_90a")] == ["cuda/sm_80,sm_90a"]
    assert main(["targets"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("cuda:sm_80,cuda:sm_90a has kernels of each in one file, "
            "cuda:sm_80,sm_90a those of the least, compiled for each") in said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nativ", ("native", "mlc targets")),
        ("tpu", ("mlc targets",)),
        ("", ("mlc targets",)),
        ("cuda:sm_12", ("sm_90", "sm_12")),
        ("cuda:sm_80,sm_91", ("sm_100", "sm_91")),
        ("cuda:sm_80a", ("sm_90a", "sm_80a")),
        ("llvm -mcpu=nonesuch", ("nonesuch",)),
        ("llvm mcpu=znver3", ("-key=value",)),
        ("llvm -bogus-option=1", ("bogus",)),
    ],
)
def test_refusals_are_one_line_that_names_what_came(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(TargetError) as caught:
        resolve(name)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.exit_code == 2
    assert all(word in text for word in words)


@pytest.mark.parametrize(("text", "parts"), [
    ("x86-64-v3", ["x86-64-v3"]),
    ("x86-64-v2,x86-64-v3, cuda:sm_90", ["x86-64-v2", "x86-64-v3", "cuda:sm_90"]),
    ("llvm -mattr=+avx2,+fma,x86-64-v2", ["llvm -mattr=+avx2,+fma", "x86-64-v2"]),
    ("native -model=l2=2M,l3=64M", ["native -model=l2=2M,l3=64M"]),
    ("x86-64-v2,nonsense", ["x86-64-v2", "nonsense"]),
    ("cuda:sm_80,sm_90a,x86-64-v3", ["cuda:sm_80,sm_90a", "x86-64-v3"]),
])
def test_several_targets_are_told_from_options_with_commas(text: str, parts: list[str]) -> None:
    assert split(text) == parts


@pytest.mark.parametrize(("text", "says"), [
    ("x86-64-v2,nonsense", "got 'nonsense'"), ("x86-64-v3,", "got ''"), ("x86-64-v2,x86-64-v2", "given once"),
])
def test_several_targets_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(TargetError, match=says) as caught:
        several(text)
    assert "\n" not in str(caught.value)
