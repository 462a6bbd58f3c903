"""The devices that measure for a run: this machine, or a fleet, which is contacted first, since ``native`` then means
its CPU."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mlc.errors import UsageError
from mlc.link import find_linker
from mlc.measure.executors import fleet, parse, remote_measurer
from mlc.measure.fleet import DeviceStatus, Fleet
from mlc.measure.measurer import Measurer
from mlc.target import Target, resolve
from mlc.tuning.events import FleetChanged, Listener

__all__ = ["Measuring", "devices"]


@dataclass(frozen=True)
class Measuring:
    """``target`` is what is measured for, ``machine`` what measures, empty for this one."""

    target: str | Target
    machine: str = ""
    fleet: Fleet | None = None

    def of(self, target: str | Target) -> Measuring:
        """The same devices for another target, as the user named it: ``native`` means the devices' CPU."""
        native = self.fleet.native if self.fleet is not None and target == "native" else ""
        return replace(self, target=Target("native", native) if native else target)

    def measurer(self, threads: int) -> Measurer | None:
        """A measurer on the fleet; None for this machine. Raises :class:`UsageError` if the devices cannot run the
        target's code."""
        if self.fleet is not None:
            return remote_measurer(self.fleet, threads)
        target = resolve(self.target)
        if target.kind == "llvm" and target.architecture != platform.machine():
            raise UsageError(f"measuring for {target.name} needs a device of {target.architecture}, but this machine "
                             f"is {platform.machine()}; start `mlc worker --rpc` there and give --executor "
                             "rpc://HOST:PORT/KEY")
        return None


@contextmanager
def devices(executor: str, target: str | Target, on_event: Listener | None = None) -> Iterator[Measuring]:
    """Reach what ``executor`` names while the block runs.

    Raises :class:`mlc.errors.UsageError` for what is no executor or cannot run the target's code,
    :class:`mlc.errors.MeasureError` where no device answers, and :class:`mlc.errors.BuildError` where nothing here
    links code for the devices.
    """
    address = parse(executor)
    if address is None:
        yield Measuring(target)
        return

    def notify(statuses: Sequence[DeviceStatus]) -> None:
        if on_event is not None:
            on_event(FleetChanged(tuple(statuses)))

    if address.kind == "rpc" and target != "native" and resolve(target).kind == "cuda":
        raise UsageError(f"workers behind RPC measure CPUs alone, but the target is {resolve(target).name}; tune for a "
                         "GPU on the machine that has it, or with Ray")
    reached = fleet(address, notify)
    try:
        if reached.native:
            _check_architecture(target, Target("native", reached.native))
            if address.kind == "rpc":  # what its devices run is built here; better to hear of it now
                find_linker(Target("native", reached.native).architecture)
        yield Measuring(target, reached.machine, reached).of(target)
    finally:
        reached.close()


def _check_architecture(target: str | Target, devices: Target) -> None:
    """Raises :class:`UsageError` where devices cannot run code for ``target`` at all."""
    if target == "native" or resolve(target).kind == "cuda" or resolve(target).architecture == devices.architecture:
        return
    raise UsageError(f"the target must be of the devices' architecture, {devices.architecture}, but "
                     f"{resolve(target).name} is of {resolve(target).architecture}; leave out --target to measure for "
                     "the devices' own CPU")
