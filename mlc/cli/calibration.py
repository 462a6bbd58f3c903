"""The machine section of ``mlc doctor``: what the target describes, beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mlc.calibration import Calibration, write
from mlc.errors import MlcError

__all__ = ["Figure", "figures", "measure"]


@dataclass(frozen=True)
class Figure:
    """One line: ``described`` is None for what no description has, ``measured`` where nothing was."""

    name: str
    what: str
    unit: str
    described: float | None
    measured: float | None


def figures(measured: Mapping[str, float]) -> list[Figure]:
    """Every figure that calibration knows, for the target ``native``; of a matrix unit only where there is one."""
    import tvm

    from mlc.target import resolve
    from schedules.machine import FACTS, cpu_machine, native_caches

    attrs = json.loads(resolve("native").attrs) | {"model": native_caches()}
    on = cpu_machine(tvm.target.Target(attrs))
    found = [
        Figure(name, fact.what, fact.unit, getattr(on, fact.field) / fact.scale, measured.get(name))
        for name, fact in FACTS.items() if on.tile_per_cycle or not fact.field.startswith("tile_")
    ]
    if "wake" in measured:
        found.append(Figure("wake", "starting one on threads that sleep", "us", None, measured["wake"]))
    return found


def measure() -> tuple[Calibration | None, list[Figure], str]:
    """Calibrate and keep the result; None with the reason where nothing is kept, since the machine was not quiet.

    Raises :class:`MlcError` where the file can't be written.
    """
    from mlc.measure.calibrate import calibrate
    from mlc.target import resolve

    calibration, readings, busy = calibrate(resolve("native"))
    shown = figures({reading.name: reading.value for reading in readings})
    if busy:
        return None, shown, f"nothing of it is kept: {busy}"
    try:
        write(calibration)
    except OSError as error:
        raise MlcError(f"the calibration must be written to the user's data folder, but {error.filename} can't be "
                       f"({error.strerror}); set MLC_DATA_DIR to a folder of yours") from error
    unsteady = ", ".join(reading.name for reading in readings if not reading.confirmed)
    return calibration, shown, f"too unsteady to be kept: {unsteady}; measure again" if unsteady else ""
