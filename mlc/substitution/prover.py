"""``python -m mlc.substitution.prover PIPE``: reads rules from standard input, and writes a verdict on each to a pipe.

It is ended where a verdict takes too long, and ends itself where one takes too much memory
(:func:`mlc.substitution.verify.bounded_verdicts`).
"""

from __future__ import annotations

import pickle
import resource
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from mlc.substitution.codec import RuleError
from mlc.substitution.rule import Rule
from mlc.substitution.verify import verdict

_EXTRA_BYTES = 1 << 30


def report(pipe: Connection, rules: Sequence[tuple[Any, Sequence[Rule]]]) -> None:
    """Send each verdict; the error of a rule that means nothing, or why there is no verdict, ends it."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _EXTRA_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        for identity, variants in rules:
            pipe.send(verdict(identity, variants))
    except RuleError as error:
        pipe.send(RuleError(str(error)))
    except MemoryError:
        pipe.send(f"it needs more than {_EXTRA_BYTES >> 30} GiB")
    except RecursionError:
        pipe.send("its parts stand too deep inside each other")


if __name__ == "__main__":
    report(Connection(int(sys.argv[1]), readable=False), pickle.load(sys.stdin.buffer))
