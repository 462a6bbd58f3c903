"""Which targets' code this machine runs."""

from __future__ import annotations

import platform

from mlc.artifact.cpu_features import missing_features, required_features
from mlc.target import resolve

__all__ = ["runs"]


def runs(target: str) -> bool:
    """Whether this CPU has all instructions of an x86-64 ``target``."""
    return platform.machine() == "x86_64" and not missing_features("x86_64", required_features(resolve(target).tvm))
