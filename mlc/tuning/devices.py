"""Who measures for a run: this machine, or a fleet that is reached first, since ``native`` means its CPU then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mlc.measure.executors import fleet, parse, remote_measurer
from mlc.measure.fleet import DeviceStatus, Fleet
from mlc.measure.measurer import Measurer
from mlc.target import Target
from mlc.tuning.events import FleetChanged, Listener

__all__ = ["Measuring", "devices"]


@dataclass(frozen=True)
class Measuring:
    """``target`` is what is measured for, ``machine`` what measures, empty for this one."""

    target: str | Target
    machine: str = ""
    fleet: Fleet | None = None

    def of(self, target: str | Target) -> Measuring:
        """The same devices for another target, as the user named it: ``native`` is what they are."""
        native = self.fleet.native if self.fleet is not None and target == "native" else ""
        return replace(self, target=Target("native", native) if native else target)

    def measurer(self, threads: int) -> Measurer | None:
        """What measures on a fleet; None for this machine."""
        return None if self.fleet is None else remote_measurer(self.fleet, threads)


@contextmanager
def devices(executor: str, target: str | Target, on_event: Listener | None = None) -> Iterator[Measuring]:
    """Reach what ``executor`` names while the block runs. Raises :class:`mlc.errors.UsageError` for what is no executor
    and :class:`mlc.errors.MeasureError` where no device answers."""
    address = parse(executor)
    if address is None:
        yield Measuring(target)
        return

    def notify(statuses: Sequence[DeviceStatus]) -> None:
        if on_event is not None:
            on_event(FleetChanged(tuple(statuses)))

    reached = fleet(address, notify)
    try:
        yield Measuring(target, reached.machine, reached).of(target)
    finally:
        reached.close()
