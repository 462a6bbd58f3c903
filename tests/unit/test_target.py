"""Friendly target names, their keys, and what is refused."""

from __future__ import annotations

import pytest
import tvm

from mlc.errors import TargetError
from mlc.target import FRIENDLY, resolve
from schedules.machine import cpu_machine


@pytest.mark.parametrize("name", FRIENDLY)
def test_every_listed_name_is_a_tvm_target(name: str) -> None:
    assert isinstance(resolve(name).tvm, tvm.target.Target)


@pytest.mark.parametrize(
    ("name", "width", "registers"), [("x86-64", 16, 16), ("x86-64-v3", 32, 16), ("x86-64-v4", 64, 32)]
)
def test_vector_registers_follow_the_level(name: str, width: int, registers: int) -> None:
    machine = cpu_machine(resolve(name, threads=3).tvm)
    assert (machine.cores, machine.vector_bytes, machine.vector_registers) == (3, width, registers)


def test_options_are_part_of_the_key() -> None:
    assert resolve("llvm -mcpu=znver3 -num-cores=4").canonical == "llvm/znver3/4"
    assert resolve("x86-64-v3", threads=2).canonical == "llvm/x86-64-v3/2"
    plain, tuned = resolve("llvm -mcpu=znver3"), resolve("llvm -mcpu=znver3 -opt-level=2 -mattr=+avx512f")
    assert tuned.canonical.startswith(plain.canonical) and tuned.canonical != plain.canonical
    assert resolve("cuda -arch=sm_90").canonical == resolve("cuda:sm_90").canonical == "cuda/sm_90"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nativ", ("native", "mlc targets")),
        ("tpu", ("mlc targets",)),
        ("", ("mlc targets",)),
        ("cuda:sm_12", ("sm_90", "sm_12")),
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
