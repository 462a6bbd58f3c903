"""What ``--help`` says of every command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import pytest
from golden_files import Golden

from mlc.cli.main import parser

#: argparse's own words and spacing differ between the others
_PYTHON = ((3, 10), (3, 11), (3, 12))


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _commands(sub)


@pytest.mark.skipif(sys.version_info[:2] not in _PYTHON, reason="argparse writes help otherwise")
def test_help(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    texts = [f"$ {command.prog} --help\n{command.format_help()}" for command in _commands(parser())]
    golden("help.txt", "\n".join(texts))
