"""A terminal shows what a build is doing; nothing of it stays behind, in the terminal or in the logger."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from mlc.networks.ablation import bert_qkv
from mlc.report.building import building, steps


def test_a_build_tells_its_steps_in_order() -> None:
    import mlc

    told: list[str] = []
    with steps(told.append):
        mlc.compile(bert_qkv(1, 16, 32, 2), log=False)
    places = [int(words[2]) for each in told if (words := each.split())[:2] == ["scheduling", "function"]]
    assert places == list(range(1, len(places) + 1)) and told[-1].startswith("generating code")
    assert told.index("importing the model") < told.index("optimising the graph") < told.index("generating code")
    assert sum(f"of {len(places)}" in each for each in told) >= len(places) > 3


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_shows_them(terminal: bool) -> None:
    out, logger = io.StringIO(), logging.getLogger("mlc.build")
    before = logger.level, list(logger.handlers)
    console = Console(file=out, force_terminal=terminal, width=100)
    with pytest.raises(KeyError), building(console, "compiling [b]"):
        logger.info("scheduling function %d of %d", 3, 7)
        raise KeyError
    assert ("compiling [b]: scheduling function 3 of 7" in out.getvalue()) is terminal
    assert (logger.level, logger.handlers) == before
    logger.info("nobody hears this")
    assert "nobody" not in out.getvalue()
