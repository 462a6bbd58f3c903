"""A short description of this machine, and whether it is idle enough to measure on."""

from __future__ import annotations

from mlc.cpu import machine_id

__all__ = ["load_warning", "machine_id"]

_QUIET = 0.25  # cores that others may use before times suffer visibly


def load_warning(seconds: float = 0.3) -> str:
    """One line if something else keeps this machine busy, else the empty text. Looks for ``seconds``.

    Call it while this process and its workers are idle; their own work would count too.
    """
    import psutil

    busy = psutil.cpu_percent(seconds) / 100 * (psutil.cpu_count() or 1)
    if busy <= _QUIET:
        return ""
    return (f"the machine should be idle while times are taken, but {busy:.1f} of its {psutil.cpu_count()} CPUs are "
            "busy; end what runs there, or expect times that are too long")
