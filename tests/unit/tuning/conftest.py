"""What tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tuning_tasks import TiledMatmul

from mlc.log import TuningLog
from mlc.tuning import session
from schedules import registry


@pytest.fixture
def small_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """A space whose best point is known, searched without the cost model that ships: a new one must not change runs."""
    monkeypatch.setattr(registry, "find", lambda func, target: TiledMatmul())
    monkeypatch.setattr(session, "pretrained", lambda target: (None, ""))


@pytest.fixture
def log(tmp_path: Path) -> TuningLog:
    return TuningLog(tmp_path / "log.db")
