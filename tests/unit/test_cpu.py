"""`native` is what a machine shows: described CPUs that hide features, built for and, where this one can, run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te

from mlc import cpu as cpu_module
from mlc import target as target_module
from mlc.cpu import FLAGS, HostCpu, host_cpu, native_attrs
from mlc.log.shipped import family, shipped_records
from mlc.target import Target, resolve
from mlc.testing import amx
from mlc.tuning.learn import pretrained
from schedules import registry
from schedules.machine import cpu_machine
from schedules.space import first_seed

TRIPLES = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}


def enabled(mcpu: str, architecture: str = "x86_64", mattr: tuple[str, ...] = ()) -> set[str]:
    attrs = {"kind": "llvm", "mcpu": mcpu, "mtriple": TRIPLES[architecture]} | ({"mattr": list(mattr)} if mattr else {})
    return {str(f) for f in tvm.target.codegen.llvm_get_cpu_features(tvm.target.Target(attrs))}


def flags_of(mcpu: str, architecture: str = "x86_64", hidden: str = "") -> frozenset[str]:
    """The kernel's flags of a CPU that has all that LLVM says of it, without those that begin with ``hidden``."""
    names = FLAGS[architecture]
    found = {names[f] for f in enabled(mcpu, architecture) if f in names}
    return frozenset(flag for flag in found if not any(flag.startswith(word) for word in hidden.split()))


def cpu(name: str, hidden: str = "", like: str = "", architecture: str = "x86_64") -> HostCpu:
    return HostCpu(architecture, name, flags_of(like or name, architecture, hidden))


@dataclass(frozen=True)
class Described:
    """A CPU and what must become of it: vector bytes and registers, features that must be and must not be used, and the
    name that LLVM gets."""

    host: HostCpu
    vectors: tuple[int, int]
    uses: str = ""
    spares: str = ""
    mcpu: str = ""


MACHINES = {
    "zen 4, whole": Described(cpu("znver4"), (64, 32), "avx512f avx512vnni fma", mcpu="znver4"),
    "zen 4, AVX-512 hidden": Described(cpu("znver4", "avx512"), (32, 16), "avx2 fma", "avx512f avx512vl", "znver4"),
    "zen 5, AVX-512 hidden": Described(cpu("znver5", "avx512 avx_vnni"), (32, 16), "avx2", "avx512f avxvnni", "znver5"),
    "Xeon, AMX hidden": Described(
        cpu("sapphirerapids", "amx"), (64, 32), "avx512fp16", "amx-tile amx-int8", "sapphirerapids"),
    "Xeon, whole": Described(
        cpu("sapphirerapids"), (64, 32), "avx512f amx-tile amx-int8 amx-bf16", mcpu="sapphirerapids"),
    "Xeon, VNNI hidden": Described(
        cpu("cascadelake", "avx512_vnni"), (64, 32), "avx512f avx512bw", "avx512vnni", "cascadelake"),
    "Xeon, VL and BW hidden": Described(
        cpu("skylake-avx512", "avx512vl avx512bw"), (64, 32), "avx512f", "avx512vl", "skylake-avx512"),
    "Haswell, AVX2 hidden": Described(cpu("haswell", "avx2"), (16, 16), "avx sse4.2", "avx2", "haswell"),
    "Haswell, AVX and all upon it hidden": Described(
        cpu("haswell", "avx fma f16c bmi"), (16, 16), "sse4.2", "avx avx2 fma f16c bmi2", "haswell"),
    "Zen 3, FMA hidden": Described(cpu("znver3", "fma"), (32, 16), "avx2", "fma", "znver3"),
    "Xeon with a desktop CPU's number": Described(
        cpu("rocketlake", like="sapphirerapids"),
        (64, 32), "avx512f amx-int8 avx512bf16 avx512fp16", mcpu="sapphirerapids"),
    "Xeon with a desktop CPU's number, AMX hidden": Described(
        cpu("rocketlake", "amx", like="sapphirerapids"), (64, 32), "avx512f avx512bf16 avx512fp16 avxvnni", "amx-tile",
        "rocketlake"),
    "Skylake with SHA": Described(
        replace(cpu("skylake"), flags=flags_of("skylake") | {"sha_ni"}),
        (32, 16), "avx2 fma sha", "avx512f", "skylake"),
    "BMI hidden": Described(cpu("skylake", "bmi abm"), (32, 16), "avx2 fma", "bmi bmi2 lzcnt", "skylake"),
    "unknown name, AVX2": Described(cpu("frobnicator-9", like="haswell"), (32, 16), "avx2 fma f16c", mcpu="x86-64-v3"),
    "unknown name, AVX-512 and VNNI": Described(
        cpu("frobnicator-9", like="cascadelake"), (64, 32), "avx512f avx512vnni", mcpu="x86-64-v4"),
    "generic, FMA hidden": Described(cpu("generic", "fma", like="haswell"), (32, 16), "avx2 bmi2", "fma", "x86-64-v2"),
    "without /proc/cpuinfo": Described(
        HostCpu("x86_64", "znver4", None, dict.fromkeys(FLAGS["x86_64"], True) | {"avx512f": False}), (32, 16), "avx2",
        "avx512f avx512vl", "znver4"),
    "nothing known": Described(HostCpu("x86_64", "", None), (16, 16), "sse2", "sse4.2 avx avx2", "x86-64"),
    "the system saves no wide registers": Described(
        replace(cpu("znver4"), detected={"avx512f": False, "avx2": True}), (32, 16), "avx2", "avx512f", "znver4"),
    "aarch64, SVE hidden": Described(
        cpu("neoverse-v1", "sve", architecture="aarch64"), (16, 32), "neon dotprod", "sve", "neoverse-v1"),
    "aarch64, unknown name": Described(
        cpu("generic", like="neoverse-n1", architecture="aarch64"),
        (16, 32), "neon dotprod fullfp16", "sve", "generic"),
    "aarch64, nothing known": Described(HostCpu("aarch64", "", None), (16, 32), "neon", "sve dotprod", "generic"),
}
described = pytest.mark.parametrize("name", MACHINES)


def target_of(host: HostCpu) -> Target:
    triple = TRIPLES[host.architecture]
    options = {"kind": "llvm", "mtriple": triple, "num-cores": 2, **native_attrs(host, triple)}
    return resolve(options)


@described
def test_code_uses_what_the_machine_shows_and_no_more(name: str) -> None:
    machine = MACHINES[name]
    attrs = native_attrs(machine.host, TRIPLES[machine.host.architecture])
    used = enabled(attrs["mcpu"], machine.host.architecture, tuple(attrs.get("mattr", ())))
    assert set(machine.uses.split()) <= used
    assert not set(machine.spares.split()) & used
    assert machine.host.hidden(used) == ()
    assert attrs["mcpu"] == machine.mcpu


@described
def test_spaces_shipped_logs_and_cost_models_follow_the_features(name: str) -> None:
    machine = MACHINES[name]
    target = target_of(machine.host)
    found = cpu_machine(target.tvm)
    assert (found.vector_bytes, found.vector_registers) == machine.vectors
    level = {(64, 32): "x86-64-v4", (32, 16): "x86-64-v3", (16, 16): None, (16, 32): None}[machine.vectors]
    model, why_not = pretrained(target)
    assert not why_not
    if level is None:
        assert not family(target).startswith("x86-64-v") and model is None and not shipped_records(target)
    else:  # the very model that is read for the level
        assert family(target) == level and model is not None and model is pretrained(resolve(level))[0]
        made_for = {record.made_for.split("/")[1] for record in shipped_records(target)}
        assert made_for == {level}


def product(rows: int, inner: int, columns: int) -> tvm.tirx.PrimFunc:
    a, b = te.placeholder((rows, inner), name="a"), te.placeholder((inner, columns), name="b")
    k = te.reduce_axis((0, inner), name="k")
    return te.create_prim_func([a, b, te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="c")])


@described
def test_code_is_built_without_what_is_hidden_and_runs_where_it_can(name: str) -> None:
    machine = MACHINES[name]
    target = target_of(machine.host)
    func = product(37, 45, 83)
    sch, _ = first_seed(registry.find(func, target.tvm), func, target.tvm)
    built = tvm.compile(sch.mod, target=target.tvm)
    assembly = built.mod.inspect_source("asm")
    if machine.host.architecture == "x86_64":
        assert ("zmm" in assembly) == (machine.vectors[0] == 64)
        assert "avx" in machine.uses or "ymm" not in assembly
        assert "fma" not in machine.spares.split() or "vfmadd" not in assembly
    if platform.machine() == machine.host.architecture and not host_cpu().hidden(
        enabled(str(target.tvm.attrs["mcpu"]), machine.host.architecture, tuple(target.tvm.attrs.get("mattr", ())))
    ):
        assert _right_in_a_child(built)


def _right_in_a_child(built: tvm.runtime.Executable) -> bool:
    """Whether the code computes the product; in a child, which an illegal instruction would end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            rng = np.random.default_rng(0)
            a, b = rng.standard_normal((37, 45), dtype="float32"), rng.standard_normal((45, 83), dtype="float32")
            out = tvm.runtime.tensor(np.zeros((37, 83), "float32"))
            os.environ["TVM_NUM_THREADS"] = "1"
            built(tvm.runtime.tensor(a), tvm.runtime.tensor(b), out)
            status = 0 if np.allclose(out.numpy(), a.astype("float64") @ b, rtol=1e-4, atol=1e-4) else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def test_few_words_say_what_is_hidden() -> None:
    attrs = native_attrs(MACHINES["zen 4, AVX-512 hidden"].host, TRIPLES["x86_64"])
    assert attrs["mattr"] == ["-avx512f"]
    assert native_attrs(cpu("znver4"), TRIPLES["x86_64"]) == {"mcpu": "znver4"}


def test_keys_differ_where_features_do() -> None:
    keys = {target_of(host).canonical for host in (cpu("znver4"), cpu("znver4", "avx512"), cpu("znver4", "fma avx512"))}
    assert len(keys) == 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="hides features of x86")
def test_the_kernels_list_decides_and_may_be_another_file(tmp_path, monkeypatch) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: Some(R) CPU(TM)  9\nflags\t\t: fpu sse sse2 pni ssse3 sse4_1\n")
    monkeypatch.setenv("MLC_CPUINFO", str(listed))
    assert cpu_module.host_flags() == {"fpu", "sse", "sse2", "pni", "ssse3", "sse4_1"}
    assert cpu_module.cpu_model() == "Some CPU 9"
    for forget in (cpu_module.host_cpu, target_module._resolve):
        forget.cache_clear()
    try:
        native = resolve("native")
        assert cpu_machine(native.tvm).vector_bytes == 16
        assert not {"sse4.2", "avx2"} & set(map(str, tvm.target.codegen.llvm_get_cpu_features(native.tvm)))
    finally:
        monkeypatch.undo()
        for forget in (cpu_module.host_cpu, target_module._resolve):
            forget.cache_clear()


def test_a_name_without_its_number_is_told_apart_by_family_and_model(tmp_path, monkeypatch) -> None:
    names = []
    for text in ("model name\t: AMD EPYC\n", "model name\t: AMD EPYC 7B13\n"):
        for model in (1, 17):
            listed = tmp_path / str(model)
            listed.write_text(f"cpu family\t: 25\nmodel\t\t: {model}\n{text}")
            monkeypatch.setenv("MLC_CPUINFO", str(listed))
            names.append(cpu_module.cpu_model())
    assert names == ["AMD EPYC (family 25, model 1)", "AMD EPYC (family 25, model 17)", *["AMD EPYC 7B13"] * 2]


def test_a_list_that_cannot_be_read_is_none(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLC_CPUINFO", str(tmp_path / "nowhere"))
    assert cpu_module.host_flags() is None and cpu_module.cpu_model()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 extensions")
def test_where_the_kernel_lists_none_the_cpu_is_asked(tmp_path, monkeypatch) -> None:
    answers = {"avx2": True, "lzcnt": True, "avx512f": False, "cmov": True}
    monkeypatch.setattr(cpu_module, "detected_features", lambda: answers)
    monkeypatch.setenv("MLC_CPUINFO", str(tmp_path / "nowhere"))
    assert cpu_module.usable_flags() == {"avx2", "abm"}
    answers.clear()
    assert cpu_module.usable_flags() is None


@pytest.mark.parametrize(("text", "name"), [
    ("CPU implementer\t: 0x41\nCPU part\t: 0xd0b\n", "cortex-a76"),
    ("CPU implementer\t: 0x41\nCPU part\t: 0xd05\nCPU implementer\t: 0x41\nCPU part\t: 0xd41\n", "cortex-a78"),
    ("CPU implementer\t: 0x61\nCPU part\t: 0xd0b\n", ""), ("CPU implementer\t: 0x41\nCPU part\t: 0x123\n", ""),
    ("CPU implementer\t: x\nCPU part\t: y\n", ""), ("model name\t: EPYC\n", ""),
])
def test_arms_own_cores_are_known_by_their_numbers(text: str, name: str, tmp_path, monkeypatch) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text(text)
    monkeypatch.setenv("MLC_CPUINFO", str(listed))
    assert cpu_module.arm_core() == name
    if name:
        assert cpu_module.cpu_model() == name
        target = tvm.target.Target({"kind": "llvm", "mtriple": TRIPLES["aarch64"], "mcpu": name})
        assert tvm.target.codegen.llvm_get_cpu_features(target)


def test_llvm_knows_every_name_of_arms_cores() -> None:
    known = set(cpu_module._ARM_PARTS.values())
    assert all(tvm.target.codegen.llvm_is_valid_cpu(name, TRIPLES["aarch64"]) for name in known)


_ASKED = """
from mlc.artifact.executable import check_machine
from mlc.cpu import host_flags, tiles_denied
from mlc.errors import ArtifactError
print(sorted(flag for flag in host_flags() if flag.startswith("amx_")), tiles_denied())
try:
    check_machine({"machine": "x86_64", "features": ["amx_int8"], "target": "t", "versions": {"tvm": ""}})
except ArtifactError as error:
    print(error)
"""


@pytest.mark.skipif(bool(amx.missing()), reason=f"{amx.missing()} must be there")
@pytest.mark.parametrize("granted", [True, False])
def test_tiles_are_shown_where_the_kernel_grants_them(granted: bool, tmp_path: Path) -> None:
    """Whoever asks what the CPU has asks the kernel for its tiles."""
    asked = subprocess.run([sys.executable, "-c", _ASKED], env={**os.environ, **amx.environment(tmp_path, granted)},
                           capture_output=True, text=True, check=True).stdout.splitlines()
    assert asked[0] == ("['amx_bf16', 'amx_int8', 'amx_tile'] False" if granted else "[] True")
    assert ("the kernel does not let this process use" in asked[1]) == (not granted)


def test_a_real_kernel_refuses_tiles_that_the_cpu_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "amx_tile" in (cpu_module.host_flags() or ()):
        pytest.skip("this CPU has them")
    described = tmp_path / "cpuinfo"
    described.write_text("flags : fpu avx2 amx_tile amx_int8\n")
    monkeypatch.setenv("MLC_CPUINFO", str(described))
    assert cpu_module.host_flags() == {"fpu", "avx2"}
    assert cpu_module.tiles_denied()
