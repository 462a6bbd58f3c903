"""What it adds to a compile that certificates are checked: ``python -m tests.performance.checking``.

For each model the rules that its search applies are checked twice, in processor milliseconds: on a machine that has
checked nothing yet, and in another process of one that remembers them by the hashes of their contents. Beside them the
time to make the library ready, and that of lowering the whole model, of which both are a part.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Checked", "checked", "main"]

#: networks whose search applies rules, and two of which nothing is searched
MODELS = ("nas_rnn", "repvgg_training", "pointnet_segmentation", "rnn_unrolled", "graph_sage", "squeezenet")


class Checked:
    """Of a model's lowering: how many rules were looked at, and processor seconds of each part."""

    def __init__(self) -> None:
        self.rules: set[str] = set()
        self.first = self.remembered = self.ready = self.whole = 0.0


def checked(compilation: Any) -> Checked:
    """Lowers a model on a machine that has checked nothing, then again where all is remembered."""
    from mlc.graph.substitute import rules
    from mlc.substitution import rewrite, trust

    found, before = Checked(), (rewrite.trusted, rules.shipped_patterns, os.environ.get("MLC_DATA_DIR"))
    spent = {"trusted": 0.0, "ready": 0.0}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            begin = time.process_time()
            try:
                return call(*args)
            finally:
                spent[name] += time.process_time() - begin
                if name == "trusted":
                    found.rules.add(args[0].name)

        return wrapper

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLC_DATA_DIR"] = folder
        rewrite.trusted = timed("trusted", before[0])
        rules.shipped_patterns = timed("ready", before[1])  # type: ignore[assignment]
        try:
            for place in ("first", "remembered"):
                trust._verdicts.clear()  # as in another process
                trust._remembered.cache_clear()
                trust._checker.cache_clear()
                before[1].cache_clear()
                spent.update(trusted=0.0, ready=0.0)
                begin = time.process_time()
                compilation.lowered()
                found.whole, found.ready = time.process_time() - begin, spent["ready"]
                setattr(found, place, spent["trusted"])
        finally:
            rewrite.trusted, rules.shipped_patterns = before[:2]
            trust._remembered.cache_clear()
            if before[2] is None:
                del os.environ["MLC_DATA_DIR"]
            else:
                os.environ["MLC_DATA_DIR"] = before[2]
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
    print(f"{'model':20} {'rules':>6} {'first ms':>9} {'remembered ms':>14} {'ready ms':>9} {'lowering ms':>12}")
    for name in args.models.split(","):
        model = PUBLISHED_MODELS[name]() if name in PUBLISHED_MODELS else network(name)
        found = checked(Compilation.of(model, args.target))
        print(f"{name:20} {len(found.rules):6} {1e3 * found.first:9.1f} {1e3 * found.remembered:14.1f} "
              f"{1e3 * found.ready:9.0f} {1e3 * found.whole:12.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
