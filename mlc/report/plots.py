"""Plots: a tuning session's progress over its trials, and latencies side by side.

Every function returns a :class:`matplotlib.figure.Figure` that belongs to nobody else (pyplot's global state is
not used); a notebook shows it, :func:`svg` makes it part of a page.
"""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlc.errors import InstallationError
from mlc.report import format as fmt
from mlc.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mlc.log.record import Record

__all__ = ["best_so_far", "by_device", "latency_bars", "png", "require_matplotlib", "svg"]

# Okabe and Ito's palette, which stays apart for colour-blind readers
_OURS, _OTHER, _LINE = "#0072B2", "#B8B8B8", "#444444"
_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_CURVES = 6
_INTERVALS = 12  # in which trials are counted


def require_matplotlib() -> None:
    """Raise :class:`InstallationError` before the work starts, where the drawing would fail after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InstallationError("plots need matplotlib, which is not installed; run `pip install matplotlib`") from None


def best_so_far(
    records: Iterable[Record], *, curves: int = _CURVES, clock: Callable[[Record], float] | None = None
) -> Figure:
    """Each task's best time over its own trials, against its first good one; the ``curves`` most improved by name.

    A logarithmic vertical axis: 1 is the first candidate that ran, 0.5 is twice as fast. With ``clock``, which gives
    the seconds at which a record was made, the horizontal axis is time.
    """
    progress = {name: best for name, best in _progress(records, clock).items() if len(best) > 1}
    ranked = sorted(progress, key=lambda name: progress[name][-1][1] / progress[name][0][1])
    figure, axes = _figure(7.0, 3.6)
    for name in ranked[curves:]:
        _curve(axes, progress[name], color=_OTHER, linewidth=0.8, zorder=1)
    for name, colour in zip(ranked[:curves], _CYCLE, strict=False):
        _curve(axes, progress[name], color=colour, linewidth=1.6, label=_short(name), zorder=2)
    if not progress:
        axes.text(0.5, 0.5, "no task has two good trials", ha="center", transform=axes.transAxes)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}×" if _leading_digit(value) in (2, 3, 5) else "")
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_xlabel("trials of the task" if clock is None else "seconds of tuning")
    axes.set_ylabel("best time so far / first")
    return figure


def by_device(records: Iterable[Record], *, clock: Callable[[Record], float] | None = None) -> Figure:
    """How fast each device of a fleet measures, and what each alone has found: trials a second over time, and the best
    so far in the geometric mean over tasks, against the first good candidate of each that any device has measured.

    A task of which a device has measured nothing yet counts as at its first; the dotted line is of all together.
    ``clock`` gives the seconds at which a record was made (default: by the clock on the wall).
    """
    at = clock or (lambda record: record.when)
    trials = sorted((r for r in records if r.verdict is None), key=at)
    devices = sorted({record.device for record in trials})
    figure, (rates, found) = _figures(2, 9.0, 3.6)
    times = [at(record) for record in trials] or [0.0]
    start, width = times[0], max((times[-1] - times[0]) / _INTERVALS, 1e-9)
    for device, colour in zip(devices, itertools.cycle(_CYCLE)):
        own = [record for record in trials if record.device == device]
        counts = Counter(min(_INTERVALS - 1, int((at(record) - start) / width)) for record in own)
        edges = [width * i for i in range(_INTERVALS + 1)]
        rates.stairs([counts[i] / width for i in range(_INTERVALS)], edges, color=colour, label=_short(device))
        found.step(*_mean_best(trials, own, at, start), where="post", color=colour, label=_short(device))
    found.step(*_mean_best(trials, trials, at, start), where="post", color=_LINE, linestyle=":", label="all")
    rates.set(xlabel="seconds", ylabel="trials a second", ylim=(0, None))
    found.set(xlabel="seconds", ylabel="best so far / first, mean of tasks")
    found.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    found.legend(frameon=False, fontsize=8)
    return figure


def _mean_best(
    every: Sequence[Record], own: Sequence[Record], at: Callable[[Record], float], start: float
) -> tuple[list[float], list[float]]:
    """Seconds, and at each the geometric mean over the tasks of ``every`` of the best of ``own`` by the first."""
    first: dict[str, float] = {}
    for record in every:
        if record.ok:
            first.setdefault(record.task_key, record.seconds)
    best, total = dict(first), 0.0  # the sum of logarithms
    times, values = [0.0], [1.0]
    for record in own:
        if record.ok and record.seconds < best[record.task_key]:
            total += math.log(record.seconds / best[record.task_key])
            best[record.task_key] = record.seconds
        times.append(at(record) - start)
        values.append(math.exp(total / len(first)) if first else 1.0)
    return times, values


def latency_bars(results: Sequence[Mapping[str, Any]], *, ours: str = "mlc") -> Figure:
    """One bar for each engine (``engine``, ``median_ms``, ``p10_ms``, ``p90_ms``), the fastest on top.

    Engines whose name starts with ``ours`` stand out; whiskers go from the 10th to the 90th percentile.
    """
    rows = sorted((r for r in results if r.get("median_ms")), key=lambda r: r["median_ms"], reverse=True)
    figure, axes = _figure(7.0, 0.9 + 0.42 * max(1, len(rows)))
    medians = [r["median_ms"] for r in rows]
    whiskers = [
        [max(0.0, r["median_ms"] - r["p10_ms"]) for r in rows], [max(0.0, r["p90_ms"] - r["median_ms"]) for r in rows],
    ]
    colours = [_OURS if str(r["engine"]).startswith(ours) else _OTHER for r in rows]
    axes.barh(range(len(rows)), medians, xerr=whiskers, color=colours, height=0.62, ecolor=_LINE, capsize=2)
    ends = [middle + above for middle, above in zip(medians, whiskers[1], strict=True)]
    for row, (end, middle) in enumerate(zip(ends, medians, strict=True)):
        style: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(fmt.seconds(middle / 1e3), (end, row), **style)
    axes.set_yticks(range(len(rows)), [str(r["engine"]) for r in rows])
    axes.set_xlim(0, max(ends, default=1.0) * 1.15)
    axes.set_xlabel("milliseconds a run, median (whiskers: 10th to 90th percentile)")
    return figure


def svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element that can stand inside a page; equal figures give equal text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "mlc", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg"):]


def png(figures: Sequence[Figure]) -> bytes:
    """The figures one below the other as one picture."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.image import imsave

    pictures = []
    for figure in figures:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pictures.append(np.asarray(canvas.buffer_rgba()))
    width = max(p.shape[1] for p in pictures)
    wide = [np.pad(p, ((0, 0), (0, width - p.shape[1]), (0, 0)), constant_values=255) for p in pictures]
    buffer = io.BytesIO()
    imsave(buffer, np.concatenate(wide), format="png")
    return buffer.getvalue()


def _progress(
    records: Iterable[Record], clock: Callable[[Record], float] | None
) -> dict[str, list[tuple[float, float]]]:
    """Task -> (trial number from 1, or time; best seconds so far), a point at each improvement and one at the end."""
    names: dict[str, str] = {}
    trials: dict[str, float] = {}
    best: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.verdict is not None:  # a winner timed again, no trial
            continue
        key = record.task_key
        names.setdefault(key, record.task_name)
        trials[key] = trials.get(key, 0) + 1 if clock is None else clock(record)
        points = best.setdefault(key, [])
        if record.ok and (not points or record.seconds < points[-1][1]):
            points.append((trials[key], record.seconds))
    ended = {key: points + [(trials[key], points[-1][1])] for key, points in best.items() if points}
    taken: dict[str, list[tuple[float, float]]] = {}
    for key, points in ended.items():
        name = names[key] if names[key] not in taken else f"{names[key]} {key[:4]}"
        taken[name] = points
    return taken


def _curve(axes: Axes, points: list[tuple[float, float]], **style: Any) -> None:
    first = points[0][1]
    axes.step([x for x, _ in points], [y / first for _, y in points], where="post", **style)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure, (axes,) = _figures(1, width, height)
    return figure, axes


def _figures(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Axes beside each other."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = [figure.add_subplot(1, count, number) for number in range(1, count + 1)]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _short(name: str, limit: int = 36) -> str:
    name = visible(name).replace("$", r"\$")  # matplotlib reads what stands between two of them as a formula
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _leading_digit(value: float) -> int:
    return round(value / 10 ** math.floor(math.log10(value))) if value > 0 else 0
