"""The file of what was measured on this machine, and the target that goes by it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlc import calibration as module
from mlc.calibration import Calibration, calibration_path, identity, read, write
from mlc.graph.task import task_key
from mlc.target import resolve
from schedules.machine import FACTS, cpu_machine

FACTS_OF_SOME_CPU = {"ghz": 3.6789, "fma": 1.0, "l2rate": 30.44, "l3rate": 9.96, "core": 25.3, "memory": 111.0,
                     "launch": 0.0341}
TEXT = "ghz=3.7,fma=1,l2rate=30,l3rate=10,core=25,memory=110,launch=0.034"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLC_DATA_DIR", str(tmp_path / "data"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def keep(**facts: float) -> Path:
    return write(Calibration(identity(), facts))


def test_what_is_written_is_read() -> None:
    assert read() == (None, "")
    assert keep(**FACTS_OF_SOME_CPU) == calibration_path()
    found, reason = read()
    assert found == Calibration(identity(), FACTS_OF_SOME_CPU) and reason == ""
    assert [file.name for file in calibration_path().parent.iterdir()] == [calibration_path().name]


def test_figures_are_rounded_and_the_same_each_time() -> None:
    assert Calibration("", FACTS_OF_SOME_CPU).text() == TEXT
    assert Calibration("", dict(reversed(FACTS_OF_SOME_CPU.items())) | {"of a later version": 1.0}).text() == TEXT
    assert Calibration("", {name: value * 1.001 for name, value in FACTS_OF_SOME_CPU.items()}).text() == TEXT


def changed(change: Callable[[dict[str, Any]], None], *, honest: bool) -> str:
    """The file's text with its content changed, and with a checksum that says so if ``honest``."""
    fields = json.loads(keep(ghz=3.0).read_text())
    change(fields)
    if honest:
        fields.pop("checksum", None)
        fields["checksum"] = module._checksum(fields)
    return json.dumps(fields)


def set_fact(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["facts"].update(ghz=value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lambda: changed(set_fact(4.0), honest=False), "checksum"),
        (lambda: changed(lambda fields: fields.pop("checksum"), honest=False), "checksum"),
        (lambda: changed(lambda fields: fields.update(version=2), honest=True), "version 1, got 2"),
        (lambda: changed(lambda fields: fields.pop("version"), honest=True), "version 1, got 'none'"),
        (lambda: changed(lambda fields: fields.update(machine="Other CPU"), honest=True), "is of 'Other CPU'"),
        (lambda: changed(lambda fields: fields.update(facts=[1, 2]), honest=True), "positive numbers"),
        *[(lambda value=value: changed(set_fact(value), honest=True), "positive numbers")
          for value in (0.0, -3.0, True, "3", None, float("nan"), float("inf"), 1e30, [3.0])],
        (lambda: keep(ghz=3.0).read_text()[:-20], "readable"),
        (lambda: "", "readable"),
        (lambda: "[" * 100_000, "readable"),
        (lambda: "[]", "version"),
        (lambda: "null", "version"),
    ],
)
def test_a_damaged_or_foreign_file_is_not_used_and_said_in_one_line(text: Callable[[], str], says: str) -> None:
    content = text()
    calibration_path().parent.mkdir(parents=True, exist_ok=True)
    calibration_path().write_text(content)
    found, reason = read()
    assert found is None and says in reason and "\n" not in reason
    assert str(calibration_path()) in reason and "mlc doctor --calibrate" in reason
    with pytest.warns(UserWarning, match="doctor --calibrate") as caught:
        native = resolve("native")
    assert len(caught) == 1 and "ghz" not in native.attrs


def test_bytes_that_are_no_text_and_folders_are_no_calibration() -> None:
    path = keep(ghz=3.0)
    path.write_bytes(b"\xff\xfe\x00{")
    assert read()[0] is None and "readable" in read()[1]
    path.unlink()
    path.mkdir()
    assert read()[0] is None and "readable" in read()[1]


def test_native_goes_by_it_and_no_other_target_does() -> None:
    names = ("native", "x86-64-v3", "llvm -mcpu=znver4", "cuda")
    before = {name: resolve(name) for name in names}
    keep(**{**FACTS_OF_SOME_CPU, "launch": 5.0})
    after = {name: resolve(name) for name in names}
    assert [name for name in names if before[name] != after[name]] == ["native"]
    on, was = cpu_machine(after["native"].tvm), cpu_machine(before["native"].tvm)
    assert (on.hz, on.launch_seconds, on.l3_rate) == pytest.approx((3.7e9, 5e-6, 10.0))
    assert (on.l1_bytes, on.l2_bytes, on.l3_bytes) == (was.l1_bytes, was.l2_bytes, was.l3_bytes)
    assert resolve("native").attrs == after["native"].attrs  # the same file, the same description
    calibration_path().unlink()
    assert resolve("native") == before["native"]


def test_what_the_user_spells_out_goes_first() -> None:
    keep(ghz=3.0)
    assert "ghz" not in resolve("native -model=l2=1M").attrs


def test_keys_of_tasks_and_logs_do_not_know_of_it() -> None:
    from tvm import te

    x = te.placeholder((64,), name="x")
    func = te.create_prim_func([x, te.compute(x.shape, lambda i: x[i] + 1.0)])
    before = resolve("native")
    keys = {before.canonical}, {task_key(func, before)}
    for factor in (1.0, 1.3, 2.0):
        keep(**{name: value * factor for name, value in FACTS_OF_SOME_CPU.items()})
        native = resolve("native")
        assert native.attrs != before.attrs
        keys[0].add(native.canonical)
        keys[1].add(task_key(func, native))
    assert [len(each) for each in keys] == [1, 1]


def test_another_number_of_threads_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_THREADS", "2")
    keep(ghz=3.0)
    monkeypatch.setenv("MLC_THREADS", "3")
    assert read() == (None, "") and "ghz" not in resolve("native").attrs


def test_every_fact_survives_the_way_to_the_description() -> None:
    keep(**{name: 2.5 for name in FACTS})
    found = cpu_machine(resolve("native", threads=1).tvm)
    assert all(getattr(found, fact.field) == pytest.approx(2.5 * fact.scale) for fact in FACTS.values())
