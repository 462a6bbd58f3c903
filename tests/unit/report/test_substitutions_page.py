"""What the page says of substitutions: which products became one, both graphs at one scale, what was measured."""

from __future__ import annotations

import re

from mlc.report.graph_svg import Box, drawing
from mlc.report.substitutions import changed, joined, letter, lines
from mlc.substitution.terms import TermBuilder, TermGraph


def gates(steps: int, count: int = 4) -> tuple[TermGraph, TermGraph]:
    """Steps of ``count`` products of one row each, the weights the same in all; and those of a step as one product."""
    ours, theirs = TermBuilder(), TermBuilder()
    own = x = ours.add("input", (), (1, 8), id=0)
    y = theirs.add("input", (), (1, 8), id=0)
    weights = [[b.add("constant", (), (8, 8), id=i) for i in range(count)] for b in (ours, theirs)]
    whole = weights[1][0]
    for i in range(1, count):
        whole = theirs.add("concat", (whole, weights[1][i]), (8, 8 * i + 8), axis=1)
    for _ in range(steps):
        parts = [ours.add("matmul", (x, w), (1, 8)) for w in weights[0]]
        wide = theirs.add("matmul", (y, whole), (1, 8 * count))
        cuts = [theirs.add("slice", (wide,), (1, 8), axis=1, begin=8 * i, end=8 * i + 8) for i in range(count)]
        x, y = parts[0], cuts[0]
        for a, b in zip(parts[1:], cuts[1:], strict=True):
            x, y = ours.add("mul", (x, a), (1, 8)), theirs.add("mul", (y, b), (1, 8))
    assert own == 0
    return ours.graph([x]), theirs.graph([y])


def test_products_that_become_one_have_one_letter() -> None:
    ours, theirs = gates(3)
    parts, made = joined(ours, theirs)
    places = [place for place, term in enumerate(ours.terms) if term.op == "matmul"]
    assert [parts[place] for place in places] == [0] * 4 + [1] * 4 + [2] * 4
    assert [made[place] for place, term in enumerate(theirs.terms) if term.op == "matmul"] == [0, 1, 2]
    titles = [box.title for box in changed(ours, theirs, parts).values() if box.group is not None]
    assert titles == ["matmul  A"] * 4 + ["matmul  B"] * 4 + ["matmul  C"] * 4


def test_equal_graphs_have_nothing_to_tell() -> None:
    ours, _ = gates(2)
    assert joined(ours, ours) == ({}, {})
    assert changed(ours, ours) == {}


def test_what_comes_after_a_change_is_not_marked() -> None:
    """The same operators of the same weights on values that rules say are equal, up to where the change is."""
    graphs = []
    for whole in (False, True):
        b = TermBuilder()
        x, w, v = b.add("input", (), (1, 8), id=0), *(b.add("constant", (), (8, 8), id=i) for i in range(2))
        if whole:
            wide = b.add("matmul", (x, b.add("concat", (w, v), (8, 16), axis=1)), (1, 16))
            parts = [b.add("slice", (wide,), (1, 8), axis=1, begin=i, end=i + 8) for i in (0, 8)]
        else:
            parts = [b.add("matmul", (x, each), (1, 8)) for each in (w, v)]
        mixed = b.add("opaque", [b.add("relu", (parts[0],), (1, 8)), parts[1]], (1, 8), id=0)
        graphs.append(b.graph([b.add("tanh", (b.add("matmul", (mixed, w), (1, 8)),), (1, 8))]))
    boxes = [changed(a, b, words={"opaque 0": "softmax"}) for a, b in (graphs, graphs[::-1])]
    assert [[box.title for box in each.values() if box.marked] for each in boxes] == [
        ["matmul", "matmul"], ["matmul", "slice 0:8", "slice 8:16"]]
    assert {box.title for each in boxes for box in each.values() if not box.marked} == {"input", "relu", "softmax"}


def test_letters_go_on_after_the_alphabet() -> None:
    assert [letter(n) for n in (0, 25, 26, 53)] == ["A", "Z", "A1", "B2"]


def test_wide_layers_are_drawn_in_rows_and_no_box_leaves_the_drawing() -> None:
    boxes = {0: Box("input", "", ())} | {i: Box(f"matmul {i}", "1 x 8", (0,)) for i in range(1, 30)}
    text = drawing(boxes)
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', text).groups())  # type: ignore[union-attr]
    frame = r'<rect x="(-?\d+)" y="(-?\d+)" width="(\d+)" height="(\d+)"'
    at = [tuple(map(float, found)) for found in re.findall(frame, text)]
    assert len(set(at)) == len(at) == 30
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in at)
    assert width < 1100


def test_a_box_is_drawn_next_to_its_reader() -> None:
    """Else all inputs of a long sequence stand in one row at the top."""
    boxes = {0: Box("input", "", ())}
    for step in range(5):
        boxes[10 * step + 10] = Box("input", "", ())
        boxes[10 * step + 11] = Box("add", "", (10 * step + 1 if step else 0, 10 * step + 10))
    text = drawing(boxes)
    rows = re.findall(r'<rect x="-?\d+" y="(\d+)".*?font-size="11.5"[^>]*>(\w+)<', text)
    inputs = [float(y) for y, title in rows if title == "input"]
    assert len(set(inputs)) == 5  # the first two are read by one


def test_lines_say_what_was_measured() -> None:
    own = {"operators": 9, "estimate": None, "rules": {}, "tasks": None}
    other = {"operators": 5, "estimate": 1e-3, "rules": {"join": 2}, "tasks": None}
    document = {"chosen": 1, "reason": "decided", "candidates": [own, other], "search_seconds": 1.0, "regions": [{}],
                "measured": {"own_seconds": 2e-3, "seconds": 1e-3}, "lost": False}
    assert lines(document) == [
        "substitutions: another graph is taken: a tuning run has decided so; 1 other found in 1.0 s",
        "  2 x join", "  9 operators become 5; estimated - -> 1.00 ms",
        "  measured in turn as wholes: the model's own graph 2.00 ms, the one that is taken 1.00 ms",
    ]
    lost = lines({**document, "chosen": 0, "reason": "kept", "measured": None, "lost": True})
    assert "did not find again" in lost[-1]
    kept = lines({**document, "chosen": 0, "candidates": [own], "reason": "hopeless", "measured": None, "regions": []})
    assert kept == ["substitutions: the model's own graph is kept: no search was made, since joining its products "
                    "could gain next to nothing"]
