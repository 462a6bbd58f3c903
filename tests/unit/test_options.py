"""What a compilation may do is one value: from arguments or settings, with one spelling."""

from __future__ import annotations

import pytest

from mlc.errors import UsageError
from mlc.options import DEFAULT_OPTIONS, CompileOptions


def test_arguments_go_before_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CompileOptions.of() == DEFAULT_OPTIONS
    monkeypatch.setenv("MLC_WINOGRAD", "0")
    monkeypatch.setenv("MLC_SUBSTITUTIONS", "0")
    assert CompileOptions.of() == CompileOptions(frozenset({"winograd"}), substitutions=False)
    assert CompileOptions.of(winograd=True, substitutions=True) == DEFAULT_OPTIONS
    monkeypatch.setenv("MLC_SUBSTITUTIONS", "yes")
    with pytest.raises(UsageError, match="MLC_SUBSTITUTIONS must be 0 or 1, got 'yes'"):
        CompileOptions.of()
    assert CompileOptions.of(substitutions=False).forbidden == {"winograd"}
    monkeypatch.setenv("MLC_INTEGERS", "0")
    assert not CompileOptions.of(substitutions=False).integers
    assert CompileOptions.of(substitutions=False, integers=True, precision="f16").precision == "f16"


def test_equal_options_have_one_spelling_and_defaults_none() -> None:
    both = CompileOptions(frozenset({"winograd", "fft"}), substitutions=False)
    assert both.canonical == "forbidden=fft,winograd substitutions=False"
    assert CompileOptions(frozenset(("fft", "winograd")), False).canonical == both.canonical
    assert CompileOptions(precision="bf16", integers=False).canonical == "precision=bf16 integers=False"
    assert hash(both) == hash(CompileOptions(frozenset(("fft", "winograd")), False))
    assert DEFAULT_OPTIONS.canonical == "" != CompileOptions.of(winograd=False, substitutions=True).canonical
