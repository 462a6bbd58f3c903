"""Damaged files of rules: ``python -m tests.fuzz.rules --count 200 --seed 0``.

A rule that was wrong must not be proved: what is proved is evaluated at random sizes on random integers.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import harness
from tests.fuzz.harness import Case, Outcome

__all__ = ["STRATEGIES", "check", "main"]

_SECONDS = 4.0  # for one rule, of the ten for the case
_SIZES = ("n", "n+1", "2*n", "n*m", "(n+m)*(n+m)*(n-m)", "n//2", "n%3", "-1", "0", "1", "9" * 18, "9" * 5000, "n^9",
          "(" * 60 + "n" + ")" * 60, "n" + "//2" * 300, "*".join(["(a+b+c+d+e)"] * 30), "1e999", "$n", "@", "", "n//0",
          "n**99999999", "\x1b[31m", "größe", "*".join(["n"] * 400))
_VALUES: tuple[Any, ...] = (None, True, -1, 0, 2**31, 10**40, 1.5, float("nan"), float("inf"), "", "x", "%0",
                            "%99", "%0.7", "\x1b[2J", [], {}, [[]], {"fraction": "1e999999999"},
                            {"fraction": "1/0"}, "9" * 6000)
_OPERATORS = ("add", "mul", "relu", "matmul", "conv2d", "concat", "slice", "transpose", "reshape", "exp", "nothing")


def _base(rng: Random) -> dict[str, Any]:
    from mlc.substitution.codec import dump_rule
    from mlc.substitution.shipped import shipped_rules

    rule = dump_rule(rng.choice(shipped_rules()))
    rule = json.loads(json.dumps(rule, default=dict))
    if rng.random() < 0.6:
        rule.pop("certificate", None)
    found: dict[str, Any] = copy.deepcopy(rule)
    return found


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside the value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def _replace(rule: dict[str, Any], rng: Random) -> None:
    where, key = rng.choice(list(_places({k: v for k, v in rule.items() if k != "certificate"})))
    where[key] = rng.choice(_VALUES)
    if key in rule and isinstance(where.get(key) if isinstance(where, dict) else None, type(rule[key])):
        rule[key] = where[key]


def _sizes(rule: dict[str, Any], rng: Random) -> None:
    kind = rng.randrange(3)
    if kind == 0:
        rule.setdefault("conditions", []).append(f"{rng.choice(_SIZES)} {rng.choice(('==', '>=', '<=', '!='))} n")
        return
    shape = rng.choice(list(rule["inputs"].values()))
    if not shape or kind == 1:
        shape.insert(rng.randrange(len(shape) + 1), rng.choice(_SIZES))
    else:
        known = [size for other in rule["inputs"].values() for size in other]
        shape[rng.randrange(len(shape))] = rng.choice((*_SIZES, *known))


def _graph(rule: dict[str, Any], rng: Random) -> None:
    nodes = rule[rng.choice(("source", "target"))]["nodes"]
    if not nodes:
        return
    node = rng.choice(nodes)
    kind = rng.randrange(6)
    if kind == 0:
        node["op"] = rng.choice(_OPERATORS)
    elif kind == 1:
        rng.shuffle(node["inputs"])
    elif kind == 2:
        node["inputs"].append(rng.choice(("%0", *rule["inputs"])))
    elif kind == 3 and node.get("attributes"):
        node["attributes"][rng.choice(list(node["attributes"]))] = rng.choice((*_SIZES, *_VALUES))
    elif kind == 4:
        nodes.remove(node)
    else:
        node["inputs"] = [rng.choice(list(rule["inputs"])) for _ in node["inputs"]]


def _certificate(rule: dict[str, Any], rng: Random) -> None:
    if rule.get("certificate"):
        for _ in range(rng.choice((1, 1, 3))):
            where, key = rng.choice(list(_places(rule["certificate"])))
            where[key] = rng.choice((*_VALUES, *_SIZES))


def _doubling(rule: dict[str, Any], rng: Random) -> None:
    """A short graph that is long when written out, or a tall one."""
    count = rng.choice((12, 40, 64, 3000))
    operator = rng.choice(("add", "mul", "matmul"))
    name = next(iter(rule["inputs"]))
    nodes = [{"op": operator, "inputs": [name, name] if not i else [f"%{i - 1}"] * 2} for i in range(count)]
    side = {"nodes": nodes, "outputs": [f"%{count - 1}"]}
    rule["source"] = side
    rule["target"] = side if rng.random() < 0.5 else rule["target"]
    rule.pop("certificate", None)


def _bytes(rule: dict[str, Any], rng: Random) -> bytes:
    data = bytearray(json.dumps(rule).encode())
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        return b"[" * rng.choice((10, 100_000)) + bytes(data)
    if kind == 2:
        return bytes(data).replace(b'"name"', b'"name": 1, "name"', 1)
    if kind == 3:
        return bytes(data).replace(b"1", b"1" * 5000, 1)
    for _ in range(rng.choice((1, 4, 20))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


_DAMAGES: dict[str, Callable[[dict[str, Any], Random], bytes | None]] = {
    "value": _replace, "sizes": _sizes, "graph": _graph, "certificate": _certificate, "doubling": _doubling,
    "bytes": _bytes,
}
STRATEGIES = tuple(_DAMAGES)


def check(case: Case) -> Outcome:
    """Read and judge the case's file; what is proved must hold where it is tried."""
    from mlc.substitution.codec import rule_text
    from mlc.substitution.verify import bounded_verdicts, read_rules

    rng = case.rng()
    rule = _base(rng)
    damaged = _DAMAGES[case.strategy](rule, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rules.json")
        path.write_bytes(damaged if damaged is not None else json.dumps(rule).encode())
        found = read_rules(path)
    for _, rules in found:
        for one in rules:
            rule_text(one)
    for verdict in bounded_verdicts(found, _SECONDS):
        json.dumps(verdict.document(), default=str)
        if any(_wrong(one) for one in verdict.rules):
            return Outcome.WRONG
    return Outcome.RIGHT


def _wrong(rule: Any) -> bool:
    from mlc.substitution.prove import Refuted
    from mlc.substitution.refute import draw_sizes, judge

    return any(isinstance(judge(rule, sizes), Refuted) for sizes in draw_sizes(rule, 8))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the shipped rules once, for all cases."""
    from mlc.substitution import check as _checker  # noqa: F401
    from mlc.substitution import verify as _verify  # noqa: F401
    from mlc.substitution.shipped import shipped_rules

    shipped_rules()
    return harness.main(STRATEGIES, check, argv)


if __name__ == "__main__":
    sys.exit(main())
