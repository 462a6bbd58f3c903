"""A small graph of operators as a drawing: layers from top to bottom, operators under what they read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Box", "drawing"]

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 150, 38, 14, 26, 10
_SWEEPS = 4


@dataclass(frozen=True)
class Box:
    """An operator with two lines of text; ``inputs`` are the keys of the boxes that it reads."""

    title: str
    detail: str
    inputs: tuple[int, ...]
    marked: bool = False


def drawing(boxes: Mapping[int, Box]) -> str:
    """The boxes, given so that inputs come first, as an SVG element. Inputs that are no boxes are left out."""
    if not boxes:
        return "<p>nothing</p>"
    layers = _ordered(_layers(boxes), boxes)
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
    depth: dict[int, int] = {}
    for key, box in boxes.items():
        depth[key] = 1 + max((depth[source] for source in box.inputs if source in depth), default=-1)
    found: list[list[int]] = [[] for _ in range(max(depth.values()) + 1)]
    for key, row in depth.items():
        found[row].append(key)
    return found


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
    fill, edge = ("#ffe8c7", "#c77700") if box.marked else ("#eef2f8", "#8a94a6")
    middle = x + _WIDTH / 2
    text = 'text-anchor="middle" font-family="sans-serif" fill="#1c2430"'
    return (f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{fill}" '
            f'stroke="{edge}"/><text x="{middle:.0f}" y="{y + 16:.0f}" font-size="12" {text}>{escape(box.title)}</text>'
            f'<text x="{middle:.0f}" y="{y + 30:.0f}" font-size="9.5" {text}>{escape(box.detail)}</text>')
