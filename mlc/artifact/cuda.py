"""Checks that this machine's GPU can run an artifact's code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlc.errors import ArtifactError

if TYPE_CHECKING:
    import tvm

__all__ = ["require_gpu"]


def require_gpu(archs: Sequence[str]) -> tvm.runtime.Device:
    """The GPU that code for ``archs`` runs on; raises :class:`ArtifactError` where there is none that fits."""
    import tvm

    device = tvm.cuda(0)
    wanted = " or ".join(archs)
    if not _exists(device):
        raise ArtifactError(
            f"a module built for cuda ({wanted}) needs an NVIDIA GPU, but this machine has none that its driver shows; "
            "load it where `nvidia-smi` lists one, or compile with --target native"
        )
    version = str(device.compute_version)
    if not any(_runs_on(arch, version) for arch in archs):
        raise ArtifactError(
            f"the module was built for {wanted}, but this GPU is sm_{version.replace('.', '')}; "
            f"compile with --target cuda:sm_{version.replace('.', '')}"
        )
    return device


def _exists(device: tvm.runtime.Device) -> bool:
    try:
        return bool(device.exist)
    except Exception:  # TVM raises whatever a missing device interface gives
        return False


def _runs_on(arch: str, version: str) -> bool:
    """Whether code for ``sm_80`` runs on a GPU of compute capability ``9.0``: its own, or a later one through PTX."""
    number = arch.removeprefix("sm_")
    major, minor = (int(part) for part in version.split("."))
    if not number.isdigit():
        return f"{major}{minor}" == number.rstrip("af")
    return (major, minor) >= (int(number[:-1]), int(number[-1]))
