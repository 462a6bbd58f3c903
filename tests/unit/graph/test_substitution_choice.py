"""Which graph is taken: what was decided before; no search where nothing can come of it; and never a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from relax_evaluation import weight
from test_substitution_search import CPU, NETWORKS, PATTERNS, QUICK, attention, found_of, network, prepared, recurrent
from tvm import relax
from tvm.relax import op

from mlc.graph.pipeline import optimise
from mlc.graph.substitute.choose import Decision, Substitutions, digest, subject
from mlc.graph.substitute.costs import Costs
from mlc.graph.substitute.gain_bound import gain_bound
from mlc.graph.substitute.read import read
from mlc.graph.substitute.search import Options
from mlc.graph.tasks import extract_tasks
from mlc.options import CompileOptions
from mlc.target import resolve


@dataclass(frozen=True)
class Said:
    """What a tuning run decided."""

    graph: str
    scale: dict[str, float] = field(default_factory=dict)
    own_seconds: float | None = None
    seconds: float | None = None


def row(steps: int = 1, width: int = 64) -> Callable[..., relax.Expr]:
    """Products one after the other: no two of them can be one."""

    def body(emit: Callable[..., relax.Expr], x: relax.Var) -> relax.Expr:
        for _ in range(steps):
            x = emit(op.nn.relu(emit(op.matmul(x, weight(width, width)))))
        return x

    return body


def promised(name: str) -> float:
    """The largest part that a search for a network may gain, as is said before it."""
    reading = read(prepared(NETWORKS[name]())["main"])
    costs = Costs(CPU.tvm, sum(array.nbytes for array in reading.constants))
    return gain_bound(reading.graph.live(), PATTERNS, costs)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_search_gains_more_than_is_promised(name: str) -> None:
    found = found_of(name)
    gained = 1.0 - min(c.estimate for c in found.candidates) / found.candidates[0].estimate
    assert promised(name) >= gained - 1e-9


def test_the_promise_tells_networks_apart() -> None:
    assert promised("recurrent") > 0.1
    graph = read(prepared(network({"x": (4, 64)}, row(3)))["main"]).graph
    assert gain_bound(graph, PATTERNS, Costs(CPU.tvm, 1e5)) == 0.0


def test_nothing_is_searched_where_nothing_can_be_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlc.graph.substitute.choose.search", lambda *_args, **_options: pytest.fail("it searched"))
    decisions: list[Decision] = []
    optimise(network({"x": (4, 64)}, row(3)), CPU, substitutions=Substitutions(PATTERNS, notify=decisions.append))
    assert decisions[0].reason == "hopeless"
    assert decisions[0].chosen == 0


def test_what_was_decided_for_the_own_graph_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlc.graph.substitute.choose.search", lambda *_args, **_options: pytest.fail("it searched"))
    mod, decisions = recurrent(steps=2, width=32), list[Decision]()
    own = Said(digest(read(prepared(mod)["main"]).graph.live()), {}, 1e-3, 2e-3)
    lowered = optimise(mod, CPU, substitutions=Substitutions(
        PATTERNS, decided=lambda _subject: own, notify=decisions.append))
    assert (decisions[0].reason, decisions[0].chosen, decisions[0].decided) == ("decided", 0, own)
    keys = [sorted(task.key for task in extract_tasks(m, CPU)) for m in (lowered, optimise(mod, CPU))]
    assert keys[0] == keys[1]


def test_what_was_decided_for_is_searched_longer() -> None:
    """It must be found again, and a tuning run may do more work than a compile."""
    mod, decisions = attention(), list[Decision]()
    for said in (None, Said("0" * 32)):
        optimise(mod, CPU, substitutions=Substitutions(
            PATTERNS, Options(work=0.0), notify=decisions.append,
            decided=lambda _subject, said=said: said))  # type: ignore[misc]
    reasons = [[report.reason for report in decision.found.reports] for decision in decisions]
    assert reasons[0] == ["work"]
    assert reasons[1] != ["work"]


def test_estimates_do_not_decide_for_gpus() -> None:
    decisions: list[Decision] = []
    optimise(recurrent(steps=1, width=32), resolve("cuda:sm_90"),
             substitutions=Substitutions(PATTERNS, QUICK, notify=decisions.append))
    assert (decisions[0].reason, decisions[0].chosen) == ("untuned", 0)


@pytest.mark.parametrize("where", ["read", "gain_bound", "search", "compare"])
def test_a_defect_in_the_search_is_a_warning_and_the_own_graph_is_taken(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object, **_options: object) -> None:
        raise RuntimeError("a long story\n of a defect")

    mod = attention()
    rules = Substitutions(PATTERNS, QUICK, notify=lambda _decision: pytest.fail("nothing was decided"))
    plain = optimise(mod, CPU)
    monkeypatch.setattr(f"mlc.graph.substitute.choose.{where}", fails)
    with pytest.warns(UserWarning, match=r"they did \(RuntimeError: of a defect\); the model's own graph is used"):
        lowered = optimise(mod, CPU, substitutions=rules)
    keys = [sorted(task.key for task in extract_tasks(m, CPU)) for m in (lowered, plain)]
    assert keys[0] == keys[1]
    monkeypatch.setenv("MLC_DEBUG", "1")
    with pytest.raises(RuntimeError, match="a defect"):
        optimise(mod, CPU, substitutions=rules)


def test_a_subject_is_a_model_a_target_and_rules() -> None:
    reading = read(prepared(recurrent(steps=1))["main"])
    names = {subject(reading, CPU, PATTERNS), subject(reading, resolve("x86-64-v4", threads=2), PATTERNS),
             subject(reading, CPU, PATTERNS[1:]), subject(reading, CPU, PATTERNS, CompileOptions.of(winograd=False)),
             subject(read(prepared(recurrent(steps=2))["main"]), CPU, PATTERNS)}
    assert len(names) == 5
    assert subject(read(prepared(recurrent(steps=1))["main"]), CPU, PATTERNS) in names
