"""Which graph of a model a tuning run decided for: a small JSON text per model and target in the log's state."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlc.log import codec

__all__ = ["PREFIX", "GraphDecision", "decision_of", "decision_text", "parse_decision"]

#: decisions are kept under this and the name of what they are about
PREFIX = "substitution/"


@dataclass(frozen=True)
class GraphDecision:
    """``subject`` names the model's graph, the target and the rules; ``graph`` is the digest of the graph to take.

    ``scale`` is that of the search that finds it. ``own_seconds`` and ``seconds`` are what the model's own graph and
    the one that was taken for the best other took when they were timed in turn, None where they were not. ``when`` is
    in seconds since the epoch: of two decisions about a subject the later one holds.
    """

    subject: str
    graph: str
    scale: Mapping[str, float] = field(default_factory=dict)
    own_seconds: float | None = None
    seconds: float | None = None
    when: float = 0.0


class States(Protocol):
    """A store of named blobs."""

    def get_state(self, name: str) -> bytes | None: ...


def decision_of(log: States, subject: str) -> GraphDecision | None:
    """The log's decision about a subject; None if there is none, or none that this version can read."""
    try:
        return parse_decision((log.get_state(PREFIX + subject) or b"").decode())
    except (codec.MalformedRecord, UnicodeDecodeError):
        return None


def decision_text(decision: GraphDecision) -> str:
    """The decision as JSON in one spelling; raises :class:`~mlc.log.codec.MalformedRecord`."""
    values = {name: getattr(decision, name) for name in GraphDecision.__dataclass_fields__}
    given = _checked({**values, "scale": dict(decision.scale)})
    return json.dumps({k: v for k, v in given.items() if v is not None}, sort_keys=True, separators=(",", ":"))


def parse_decision(text: str) -> GraphDecision:
    """Inverse of :func:`decision_text`; raises :class:`~mlc.log.codec.MalformedRecord`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise codec.MalformedRecord(f"a decision must be JSON, got {text[:40]!r} ({error})") from None
    return GraphDecision(**_checked(values))


def _checked(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict) or not {"subject", "graph"} <= set(values) <= set(_FIELDS):
        raise codec.MalformedRecord("a decision has the fields subject and graph, and may have "
                                    f"{', '.join(_FIELDS[2:])}")
    for name in ("subject", "graph"):
        if not isinstance(values[name], str) or not values[name]:
            raise codec.MalformedRecord(f"a decision's {name} must be text, got {values[name]!r}")
    scale = values.get("scale", {})
    numbers = [values.get("when", 0.0), *(values.get(name) or 0.0 for name in ("own_seconds", "seconds"))]
    if not isinstance(scale, dict) or not all(map(_is_number, [*numbers, *scale.values()])):
        raise codec.MalformedRecord("a decision's scale, seconds and when must be numbers from 0 on")
    return {**values, "scale": {str(k): float(v) for k, v in sorted(scale.items())}}


_FIELDS = tuple(GraphDecision.__dataclass_fields__)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
