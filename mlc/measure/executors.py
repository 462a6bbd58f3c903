"""Executors by name: ``local``, ``ray[://HOST:PORT[/CLASS]]``, ``rpc://HOST:PORT/KEY``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mlc.errors import UsageError
from mlc.measure.dispatch import Dispatcher
from mlc.measure.fleet import Devices, DeviceStatus, Fleet
from mlc.measure.measurer import MeasureOptions

__all__ = ["FORMS", "Address", "fleet", "parse", "remote_measurer"]

FORMS = "local, ray, ray://HOST:PORT[/CLASS], rpc://HOST:PORT/KEY"
#: times that a job is begun before its candidates count as failed: devices may go at any moment
_ATTEMPTS = 6
#: seconds beyond its limit that a job may wait for a device; the fleet itself notices those that hang
_GRACE = 900.0


class Address:
    """``kind`` is ``ray`` or ``rpc``; ``place`` is HOST:PORT, or empty; ``name`` a class or a key, or empty."""

    def __init__(self, kind: str, place: str = "", name: str = "") -> None:
        self.kind, self.place, self.name = kind, place, name


def parse(text: str) -> Address | None:
    """Parse ``--executor``; None for ``local``. Raises :class:`UsageError` for anything that is no executor."""
    if text == "local":
        return None
    if text == "ray":
        return Address("ray")
    match = re.fullmatch(r"(ray|rpc)://([\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5})(?:/([\w.-]+))?", text)
    if match is None or (match[1] == "rpc" and not match[3]) or int(match[2].rpartition(":")[2]) > 65535:
        raise UsageError(f"the executor must be one of {FORMS}, got {text!r}")
    return Address(match[1], match[2], match[3] or "")


def fleet(
    address: Address, notify: Callable[[Sequence[DeviceStatus]], None] | None = None, patience: float = 60.0
) -> Fleet:
    """The devices at an address, of which one is there by now; to be closed. Raises :class:`MeasureError` where nothing
    answers."""
    found = Fleet(_devices(address), notify=notify, patience=patience)
    try:
        found.wait_for_device()
    except BaseException:
        found.close()
        raise
    return found


def remote_measurer(devices: Fleet, threads: int) -> Dispatcher:
    """A measurer on a fleet, to be closed by the caller."""
    return Dispatcher(devices, MeasureOptions(threads=threads), attempts=_ATTEMPTS, grace=_GRACE)


def _devices(address: Address) -> Devices:
    if address.kind == "ray":
        from mlc.measure.ray_devices import RayDevices

        return RayDevices(address.place, address.name)
    from mlc.measure.rpc_devices import RpcDevices

    return RpcDevices(address.place, address.name)
