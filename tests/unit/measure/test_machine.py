"""What is said about the machine."""

from __future__ import annotations

import psutil
import pytest

from mlc.cpu import cpu_model
from mlc.measure import load_warning, machine_id


def test_the_machine_in_a_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_THREADS", "3")
    text = machine_id()
    assert text == f"{cpu_model()}, 3 cores" and "\n" not in text and "  " not in text and "(R)" not in text
    monkeypatch.setenv("MLC_THREADS", "1")
    assert machine_id().endswith(", 1 core")


def test_a_busy_machine_is_named_and_a_quiet_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds: 40.0)
    assert "1.6 of its 4 CPUs are busy" in load_warning()
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds: 5.0)
    assert load_warning() == ""
