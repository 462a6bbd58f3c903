"""Progress of a tuning run on standard error: a live table in a terminal, otherwise one line per batch, or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mlc.report import format as fmt
from mlc.report.session import SessionView, TaskView
from mlc.report.tables import fitted
from mlc.tuning.events import (
    BatchCompiled,
    BatchMeasured,
    Event,
    Finished,
    FleetChanged,
    Listener,
    SessionStarted,
    TaskConfirmed,
    TaskStopped,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["LiveTable", "line", "listening"]

_STYLE = {"tuning": "bold", "waiting": "dim", "tuned": "green", "failing": "red"}
_SHOWN_DEVICES = 4
_OTHER_LINES = 6  # what the display shows besides tasks


@contextmanager
def listening(console: Console, *, as_json: bool = False) -> Iterator[Listener]:
    """A listener that shows events on ``console`` while the block runs; ``as_json``: each as one line of JSON."""
    if as_json:
        yield lambda event: _write_line(console, event)
        return
    if not console.is_terminal:
        view = SessionView()

        def plain(event: Event) -> None:
            view.update(event)
            text = line(event, view)
            if text:
                console.print(text, soft_wrap=True)

        yield plain
        return
    from rich.live import Live

    shown = LiveTable(console.size.height)
    with Live(get_renderable=shown.render, console=console, refresh_per_second=4, transient=True):
        yield shown.update


def _write_line(console: Console, event: Event) -> None:
    console.file.write(json.dumps(event.to_json()) + "\n")  # whole and unwrapped, whatever the console's width
    console.file.flush()


class LiveTable:
    """The live display. Between events the elapsed and the remaining time go on by ``clock`` (seconds)."""

    def __init__(self, height: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.view = SessionView()
        self._fleet: FleetChanged | None = None
        self._rows = max(3, height - _OTHER_LINES)
        self._clock = clock
        self._at = clock()

    def update(self, event: Event) -> None:
        """Take one event in."""
        self.view.update(event)
        self._at = self._clock()
        if isinstance(event, FleetChanged):
            self._fleet = event

    def render(self) -> RenderableType:
        """The table, the bar and the line below them."""
        view, since = self.view, self._clock() - self._at
        if not view.tasks:
            return Text("preparing the tasks ...", style="dim")
        ranked = list(view.ranked())
        rows = self._rows - (self._fleet is not None)
        visible = ranked[:rows]
        active = view.tasks.get(view.active)
        if active is not None and active not in visible:
            visible[-1] = active
        cells = [self._row(task) for task in visible]
        right = ("trials", "best", "roofline", "share", "gain")
        shown = fitted(("task", "calls", *right, "state"), cells, right=("calls", *right),
                       spare=("calls", "trials", "gain"))
        parts: list[RenderableType] = [shown]
        if len(ranked) > rows:
            parts.append(Text(f"and {len(ranked) - rows} smaller tasks", style="dim"))
        fleet = [] if self._fleet is None else [Text(_devices(self._fleet).strip(), overflow="ellipsis", no_wrap=True)]
        return Group(*parts, self._bar(since), Text(_summary(view, since)), *fleet)

    def _row(self, task: TaskView) -> tuple[object, ...]:
        kind = task.state.partition(":")[0]
        name = f"> {task.plan.name}" if task.plan.key == self.view.active else f"  {task.plan.name}"
        share = f"{100 * self.view.share(task):.0f}%" if self.view.used(task) else "not used"
        reached = "-" if task.fraction is None else f"{100 * task.fraction:.0f}%"
        best = f"~ {fmt.seconds(task.expected)}" if task.expected else fmt.seconds(task.best)
        cells = (name, task.plan.weight, task.trials, best, reached, share, fmt.factor(task.gain),
                 kind)
        return tuple(Text(str(cell), style=_STYLE.get(kind, "")) for cell in cells)

    def _bar(self, since: float) -> RenderableType:
        done = self.view.done
        if done is None:
            return Text("")
        if self.view.seconds_budget:
            done = min(1.0, max(done, (self.view.elapsed + since) / self.view.seconds_budget))
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=1.0, completed=done, width=50), f"{100 * done:.0f}%")
        return grid


def line(event: Event, view: SessionView) -> str:
    """An event as one line of text, after ``view`` has taken it in; empty where it needs none."""
    match event:
        case SessionStarted():
            return _started(event, view)
        case BatchMeasured():
            task = view.tasks[event.task]
            gain = _over_untuned(task.gain)
            failed = f", failed: {_counts(event.failures)}" if event.failures else ""
            return (f"{fmt.duration(event.elapsed):>7}  {event.name}: trial {event.task_trials}, best "
                    f"{fmt.seconds(event.best_seconds)}{gain}{failed}; {_model(view)}{_left(event.eta)}")
        case BatchCompiled():
            refused = f", refused: {sum(event.failures.values())}" if event.failures else ""
            return (f"{fmt.duration(event.elapsed):>7}  {event.name}: {event.task_trials} compiled, best ~ "
                    f"{fmt.seconds(event.expected_seconds)}{refused}; {_model(view)}{_left(event.eta)}")
        case TaskStopped(reason="untimed"):
            return f"{'':>7}  {event.name}: untimed, {event.trials} candidates compiled"
        case TaskStopped():
            return f"{'':>7}  {event.name}: stopped, {event.reason}, after {event.trials} trials"
        case TaskConfirmed():
            return (f"{'':>7}  {event.name}: {event.verdict}, {fmt.seconds(event.best_seconds)} "
                    f"against {fmt.seconds(event.default_seconds)} untuned")
        case FleetChanged():
            return _devices(event)
        case Finished():
            return ""


def _started(event: SessionStarted, view: SessionView) -> str:
    if view.trials:  # a further run, with what the first has shown
        return f"{'':>7}  {view.graphs} graphs of the model now; new tasks: {view.added}"
    limits = []
    if event.trials is not None:
        limits.append(f"{event.trials} trials")
    if event.seconds is not None:
        limits.append(fmt.duration(event.seconds))
    known = sum(1 for task in event.tasks if task.known)
    resumed = f", {event.spent_trials} trials spent before" if event.spent_trials else ""
    of = f" of {view.graphs} graphs" if view.graphs > 1 else ""
    return (f"{len(event.tasks)} tasks{of}, {known} of them in the log already; budget: "
            f"{' or '.join(limits) or 'until nothing gains any more'}{resumed}")


def _devices(event: FleetChanged) -> str:
    """How many devices measure, how fast, and what became of the others."""
    working = [d for d in event.devices if d.state in ("busy", "idle")]
    text = (f"{'':>7}  {len(working)} devices, {sum(d.rate for d in working):.1f} results/s: "
            + ", ".join(f"{d.device} {d.results}" + (f" ({d.failures} failed)" if d.failures else "")
                        for d in working[:_SHOWN_DEVICES]))
    more = len(working) - _SHOWN_DEVICES
    text += f" and {more} more" if more > 0 else ""
    return text + "".join(f"; {d.device}: {d.state}" for d in event.devices if d not in working)


def _summary(view: SessionView, since: float) -> str:
    trials = f"{view.trials}/{view.trials_budget} trials" if view.trials_budget else f"{view.trials} trials"
    eta = None if view.eta is None else max(0.0, view.eta - since)
    failed = f" · failed: {_counts(view.failures)}" if view.failures else ""
    graphs = ""
    if view.graphs > 1:
        graphs = f" · {view.graphs} graphs, {f'no. {view.graph}' if view.graph else 'its own'} leads"
    elapsed = fmt.duration(view.elapsed + since)
    return f"{elapsed} elapsed{_left(eta, ' · ')} · {trials} · {_model(view)}{graphs}{failed}"


def _model(view: SessionView) -> str:
    return f"model {fmt.seconds(view.latency)}{_over_untuned(view.gain)}" if view.latency else "model not known yet"


def _over_untuned(gain: float | None) -> str:
    """Nothing while there is no gain to tell of."""
    text = fmt.factor(gain)
    return "" if text in ("-", "1.00×") else f" ({text} over untuned)"


def _left(eta: float | None, separator: str = ", ") -> str:
    return "" if eta is None else f"{separator}{fmt.duration(eta)} left"


def _counts(failures: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(failures.items()))
