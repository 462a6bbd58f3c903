"""Draws a small operator graph as SVG, in layers from top to bottom."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mlc.text import as_html

__all__ = ["Box", "drawing"]

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 116, 36, 10, 22, 8
_SWEEPS = 4
#: boxes side by side; a layer of more is drawn in several rows
_ACROSS = 8
#: fills of boxes that are neither marked nor grouped, that are marked, and of groups, which repeat
_PLAIN, _MARKED = ("#eef2f8", "#8a94a6"), ("#ffe8c7", "#c77700")
_GROUPS = (("#cfe8ff", "#0072b2"), ("#d3f2e3", "#009e73"), ("#f3daea", "#b0558f"), ("#f7f3c0", "#a39500"),
           ("#e3ddf7", "#6a55b0"), ("#f7d9cf", "#c0502e"), ("#d5f1f4", "#1b8a99"), ("#e6ecd0", "#6f8a1b"))


@dataclass(frozen=True)
class Box:
    """An operator with two lines of text; ``inputs`` are the keys of the boxes that it reads. Boxes of one ``group``
    have one colour; ``more`` is shown under the pointer."""

    title: str
    detail: str
    inputs: tuple[int, ...]
    marked: bool = False
    group: int | None = None
    more: str = ""


def drawing(boxes: Mapping[int, Box]) -> str:
    """The boxes, given so that inputs come first, as an SVG element. Inputs that are no boxes are left out."""
    if not boxes:
        return "<p>nothing</p>"
    ordered = _ordered(_layers(boxes), boxes)
    layers = [layer[i : i + _ACROSS] for layer in ordered for i in range(0, len(layer), _ACROSS)]
    columns = max(map(len, layers))
    width = columns * (_WIDTH + _GAP_X) - _GAP_X + 2 * _MARGIN
    height = len(layers) * (_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _MARGIN
    at: dict[int, tuple[float, float]] = {}
    for row, layer in enumerate(layers):
        start = (width - len(layer) * (_WIDTH + _GAP_X) + _GAP_X) / 2
        for column, key in enumerate(layer):
            at[key] = start + column * (_WIDTH + _GAP_X), _MARGIN + row * (_HEIGHT + _GAP_Y)
    lines = [_line(at[source], at[key]) for key, box in boxes.items() for source in box.inputs if source in at]
    shapes = [_shape(boxes[key], *at[key]) for layer in layers for key in layer]
    return (f'<svg class="graph" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
            f'role="img">{"".join(lines + shapes)}</svg>')


def _layers(boxes: Mapping[int, Box]) -> list[list[int]]:
    """Each box as low as what reads it lets it be, so that lines are short and steps of a sequence stay together."""
    depth: dict[int, int] = {}
    for key, box in boxes.items():
        depth[key] = 1 + max((depth[source] for source in box.inputs if source in depth), default=-1)
    above: dict[int, int] = {}
    for key in reversed(list(boxes)):
        depth[key] = above.get(key, depth[key] + 1) - 1
        for source in boxes[key].inputs:
            if source in depth:
                above[source] = min(above.get(source, depth[key]), depth[key])
    found: list[list[int]] = [[] for _ in range(max(depth.values()) + 1)]
    for key, row in depth.items():
        found[row].append(key)
    return [layer for layer in found if layer]


def _ordered(layers: Sequence[list[int]], boxes: Mapping[int, Box]) -> list[list[int]]:
    """Each layer by the mean place of what its boxes read or, from below, are read by: fewer lines cross."""
    readers: dict[int, list[int]] = {key: [] for key in boxes}
    for key, box in boxes.items():
        for source in box.inputs:
            if source in readers:
                readers[source].append(key)
    found = [list(layer) for layer in layers]
    for sweep in range(_SWEEPS):
        place = {key: i / max(1, len(layer)) for layer in found for i, key in enumerate(layer)}
        for layer in found if sweep % 2 == 0 else reversed(found):
            near: dict[int, Collection[int]] = {
                key: boxes[key].inputs if sweep % 2 == 0 else readers[key] for key in layer
            }
            layer.sort(key=lambda key: _mean([place[n] for n in near[key] if n in place], place[key]))
            place.update({key: i / max(1, len(layer)) for i, key in enumerate(layer)})
    return found


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    x0, y0, x1, y1 = start[0] + _WIDTH / 2, start[1] + _HEIGHT, end[0] + _WIDTH / 2, end[1]
    bend = (y1 - y0) / 2
    return (f'<path d="M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + bend:.0f} {x1:.0f},{y1 - bend:.0f} {x1:.0f},{y1:.0f}" '
            'fill="none" stroke="#8a94a6" stroke-width="1.2"/>')


def _shape(box: Box, x: float, y: float) -> str:
    fill, edge = _MARKED if box.marked else _PLAIN
    if box.group is not None:
        fill, edge = _GROUPS[box.group % len(_GROUPS)]
    middle = x + _WIDTH / 2
    text = 'text-anchor="middle" font-family="sans-serif" fill="#1c2430"'
    more = f"<title>{as_html(box.more)}</title>" if box.more else ""
    return (f'<g>{more}<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{fill}" '
            f'stroke="{edge}"/>'
            f'<text x="{middle:.0f}" y="{y + 15:.0f}" font-size="11.5" {text}>{as_html(box.title)}</text>'
            f'<text x="{middle:.0f}" y="{y + 28:.0f}" font-size="9.5" {text}>{as_html(box.detail)}</text></g>')
