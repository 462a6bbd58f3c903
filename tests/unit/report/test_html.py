"""The report page: every function is on it, costliest first, and nothing in a model's names can become markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from mlc.errors import UsageError
from mlc.log.record import Record
from mlc.report.html import CompileReport, FunctionRow, check_folder, page, write

ROWS = (
    FunctionRow("fused_add", 3, "elementwise", "seed"),
    FunctionRow("fused_conv2d_relu", 2, "conv", "log", 1e-3, 2e8, 40, {"tile_m": 6, "unroll": 1}, "if a < b: pass",
                bytes=4e6, roofline_seconds=5e-4),
    FunctionRow("fused_dense<b>", 1, "gemm", "shipped", 6e-3, 9e8, 12),
)


class _Balanced(HTMLParser):
    """Fails on a tag that isn't closed in order; collects the table's rows."""

    void = frozenset(("meta", "br", "link", "use", "path", "image"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.rows[-1][-1] += data


def _parsed(report: CompileReport) -> _Balanced:
    parser = _Balanced()
    parser.feed(page(report))
    parser.close()
    assert parser.open == []
    return parser


def test_functions_are_sorted_by_what_they_cost_a_run() -> None:
    rows = _parsed(CompileReport("m", ["t"], ROWS)).rows[1:]
    assert [row[0].split("tile_m")[0] for row in rows] == ["fused_dense<b>", "fused_conv2d_relu", "fused_add"]
    assert rows[1][1:3] == ["2", "1.00 ms"] and rows[1][3] == "25.0%" and rows[1][5:9] == [
        "200 MFLOP", "4.00 MB", "500 µs", "200 GFLOP/s"]
    assert rows[2][2] == "-" and rows[2][-1] == "seed" and rows[0][-1] == "shipped" and rows[1][-1] == "log, 40 trials"


def test_names_and_code_are_escaped() -> None:
    text = page(CompileReport("<script>alert(1)</script>", ["a & b"], ROWS))
    assert "<script>" not in text and "fused_dense&lt;b&gt;" in text and "if a &lt; b: pass" in text


def test_the_curve_and_the_failures_are_shown_where_there_are_records() -> None:
    records = [Record("k", "conv", "conv", {}, "[]", (t,)) for t in (3e-3, 1e-3)]
    records += [Record("k", "conv", "conv", {}, "[]", failure="timeout")]
    text = page(CompileReport("m", [], ROWS, records))
    assert "3 trials; failures: 1 timeout." in text and "<svg" in text
    assert "first seed" in page(CompileReport("m", [], ROWS)) and "<svg" not in page(CompileReport("m", [], ROWS))


def test_write_makes_the_folder(tmp_path) -> None:
    path = write(tmp_path / "a" / "b", CompileReport("m", [], ROWS))
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_file_in_the_place_of_the_folder_is_refused_first(tmp_path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        check_folder(tmp_path / "x")
