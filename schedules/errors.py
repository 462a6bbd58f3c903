"""What schedules raise."""

from __future__ import annotations

__all__ = ["InvalidDecision"]


class InvalidDecision(ValueError):
    """A combination of knob values that this space's program cannot carry out (skip the candidate)."""
