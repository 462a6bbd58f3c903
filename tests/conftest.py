"""Options of the test command, and what lets tests run beside each other in several processes."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections import Counter, defaultdict

import numpy as np
import pytest

# what the shell that runs the tests may have set: the width of tables, and that jobs in the background ignore Ctrl-C
os.environ.pop("COLUMNS", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the files of tests/golden anew")


@pytest.fixture(autouse=True)
def own_random_numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test draws from its module's ``RNG`` does not depend on which tests ran before it in its process."""
    if isinstance(getattr(request.module, "RNG", None), np.random.Generator):
        seed = zlib.crc32(request.node.nodeid.encode())
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng(seed))


#: of a function's cases ``make test`` runs one of so many, and at least one
_ONE_OF = 6


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which cases are left to ``make test-all``: of a function marked ``sampled(every)`` all but the first of each
    ``every``, of any other one most.

    The latter are drawn by their names, so that a case runs, or does not, whatever else is collected, and neither the
    innermost nor the outermost parameter decides. Another ``MLC_TEST_SAMPLE`` draws others.
    """
    seen: Counter[tuple[object, str]] = Counter()
    cases: defaultdict[tuple[object, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        function = item.parent, getattr(item, "originalname", item.name)
        if mark is None:
            cases[function].append(item)
            continue
        if seen[function] % mark.args[0]:
            item.add_marker("slow")
        seen[function] += 1
    sample = os.environ.get("MLC_TEST_SAMPLE", "")
    for several in cases.values():
        drawn = sorted(several, key=lambda item: zlib.crc32((item.nodeid + sample).encode()))
        for item in drawn[max(1, len(drawn) // _ONE_OF):]:
            item.add_marker("slow")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Processes that share the cases must name them alike, or none of them runs any."""
    if " object at 0x" in item.nodeid:
        raise pytest.UsageError(f"a case must be named alike in every process, got {item.nodeid}; give it an id")


def pytest_collection_finish() -> None:
    """What imports and collection have made stays: collections of garbage need not go through it again."""
    gc.collect()
    gc.freeze()
