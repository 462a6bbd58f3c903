"""Which instructions code needs, and which this machine has."""

from __future__ import annotations

import platform

import pytest

from mlc.artifact import cpu_features
from mlc.target import resolve

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 extensions")


@x86
@pytest.mark.parametrize(
    ("target", "needed", "not_needed"),
    [
        ("x86-64", set(), {"sse4_2", "avx"}),
        ("x86-64-v2", {"sse4_2", "popcnt"}, {"avx"}),
        ("x86-64-v3", {"avx2", "fma", "bmi2", "f16c"}, {"avx512f"}),
        ("x86-64-v4", {"avx2", "avx512f", "avx512bw", "avx512vl"}, {"avx512_vnni"}),
        ("llvm -mcpu=znver4", {"avx512_vnni", "avx512_bf16"}, {"amx_tile"}),
        ("cuda:sm_90", set(), {"avx"}),
    ],
)
def test_levels(target: str, needed: set[str], not_needed: set[str]) -> None:
    found = set(cpu_features.required_features(resolve(target).tvm))
    assert needed <= found and not (found & not_needed)


def test_this_machine_has_what_native_needs() -> None:
    needed = cpu_features.required_features(resolve("native").tvm)
    assert needed and cpu_features.missing_features(platform.machine(), needed) == ()


def test_what_is_missing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "usable_flags", lambda: frozenset({"avx", "fma"}))
    assert cpu_features.missing_features(platform.machine(), ("avx", "avx2", "fma", "avx512f")) == ("avx2", "avx512f")
    assert cpu_features.missing_features("riscv64", ("avx",)) == ("riscv64",)


def test_without_cpuinfo_and_llvm_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "usable_flags", lambda: None)
    assert cpu_features.missing_features(platform.machine(), ("avx512f",)) == ()


@x86
def test_what_a_target_needs_and_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = frozenset(cpu_features.required_features(resolve("x86-64-v3").tvm))
    monkeypatch.setattr(cpu_features, "usable_flags", lambda: shown)
    monkeypatch.setattr(cpu_features, "driver_missing", lambda: True)
    assert cpu_features.lacking(resolve("x86-64-v3")) == ""
    assert cpu_features.lacking(resolve("x86-64-v4")).startswith("the instructions avx512bw, avx512cd")
    assert cpu_features.lacking(resolve("llvm -mtriple=aarch64-linux-gnu")) == "a CPU of aarch64"
    assert cpu_features.lacking(resolve("cuda:sm_90")) == "an NVIDIA driver"
