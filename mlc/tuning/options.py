"""The options of a tuning run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from mlc.errors import UsageError
from mlc.tuning.strategy import check_name

__all__ = ["TuneOptions"]


@dataclass(frozen=True)
class TuneOptions:
    """``trials`` and ``seconds`` bound the whole run, whichever is reached first; None leaves one open.

    With both open the run ends when no task is expected to gain any more. ``batch`` candidates of one task are
    measured together. ``resume`` goes on with the budget of the last run on the same tasks. ``confirm_rounds`` is
    how often the winner and its rivals are timed in turn before the winner counts; 0 trusts single measurements.
    """

    trials: int | None = None
    seconds: float | None = None
    seed: int = 0
    batch: int = 8
    strategy: str = "evolutionary"
    resume: bool = False
    confirm_rounds: int = 12

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise UsageError(f"the trials must be at least 1, got {self.trials}; leave them out for no bound")
        if self.seconds is not None and not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise UsageError(f"the seconds must be positive, got {self.seconds}; leave them out for no bound")
        if self.batch < 1:
            raise UsageError(f"a batch must hold at least 1 candidate, got {self.batch}")
        if self.confirm_rounds < 0:
            raise UsageError(f"the rounds of the last comparison must not be negative, got {self.confirm_rounds}")
        check_name(self.strategy)

    def to_json(self) -> dict[str, Any]:
        """The options as JSON values."""
        return asdict(self)
