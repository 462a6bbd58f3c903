"""What it adds to a compile that certificates are checked: ``python -m tests.performance.checking``.

For each model the rules that another graph of it rests on are checked twice, in processor milliseconds: on a machine
that has checked nothing yet, and in another process of one that remembers them by the hashes of their contents. Beside
them that of lowering the whole model, of which it is a part.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["Checked", "checked", "main"]

#: networks whose search applies rules, and two of which nothing is searched
MODELS = ("nas_rnn", "repvgg_training", "pointnet_segmentation", "rnn_unrolled", "graph_sage", "squeezenet")


class Checked:
    """Of a model's lowering: how many rules were looked at, and processor seconds of each part."""

    def __init__(self) -> None:
        self.rules: set[str] = set()
        self.first = self.remembered = self.whole = 0.0


def checked(compilation: Any) -> Checked:
    """Lowers a model on a machine that has checked nothing, then again where all is remembered."""
    from mlc.graph.substitute import search
    from mlc.graph.substitute.rules import shipped_patterns
    from mlc.substitution import rewrite, trust

    found, trusted, folder_before = Checked(), rewrite.trusted, os.environ.get("MLC_DATA_DIR")
    spent = 0.0

    def timed(rule: Any) -> bool:
        nonlocal spent
        begin = time.process_time()
        try:
            return trusted(rule)
        finally:
            spent += time.process_time() - begin
            found.rules.add(rule.name)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLC_DATA_DIR"] = folder
        rewrite.trusted = search.trusted = timed
        try:
            for place in ("first", "remembered"):
                trust._verdicts.clear()  # as in another process
                trust._remembered.cache_clear()
                trust._checker.cache_clear()
                shipped_patterns.cache_clear()  # which remember what they were told
                spent, begin = 0.0, time.process_time()
                compilation.lowered()
                found.whole = time.process_time() - begin
                setattr(found, place, spent)
        finally:
            rewrite.trusted = search.trusted = trusted
            trust._remembered.cache_clear()
            if folder_before is None:
                del os.environ["MLC_DATA_DIR"]
            else:
                os.environ["MLC_DATA_DIR"] = folder_before
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """A line for each model."""
    from mlc.compilation import Compilation
    from mlc.networks.ablation import PUBLISHED_MODELS
    from tests.performance.substitutions import network

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated; networks of bench-substitutions "
                                                                  "and bench-written")
    parser.add_argument("--target", default="native", help="what would be built for")
    args = parser.parse_args(argv)
    print(f"{'model':20} {'rules':>6} {'first ms':>9} {'remembered ms':>14} {'lowering ms':>12}")
    for name in args.models.split(","):
        model = PUBLISHED_MODELS[name]() if name in PUBLISHED_MODELS else network(name)
        found = checked(Compilation.of(model, args.target))
        print(f"{name:20} {len(found.rules):6} {1e3 * found.first:9.1f} {1e3 * found.remembered:14.1f} "
              f"{1e3 * found.whole:12.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
