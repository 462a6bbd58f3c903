"""A log stays quick because what is asked of it is answered from indices: the plans, not the times, are checked."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from log_records import key, record

from mlc.log import TuningLog


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with TuningLog(tmp_path_factory.mktemp("plans") / "log.db") as made:
        made.append(record(i, i % 9, ok=i % 4 > 0, session=f"s{i % 3}") for i in range(400))
        made._db.execute("ANALYZE")
        yield made


def _plans(log: TuningLog, call: Callable[[], object]) -> list[tuple[str, str]]:
    """``(statement, plan)`` of every query that ``call`` makes."""
    statements: list[str] = []
    log._db.set_trace_callback(statements.append)
    try:
        call()
    finally:
        log._db.set_trace_callback(None)
    queries = [re.sub(r"\b[Ii]nf\b", "9e999", s) for s in statements if s.startswith("SELECT")]
    assert queries
    return [(q, "; ".join(row[3] for row in log._db.execute(f"EXPLAIN QUERY PLAN {q}"))) for q in queries]


@pytest.mark.parametrize("call", [
    lambda log: log.best(key(3)), lambda log: log.workload(key(1)),
    lambda log: list(log.records(key(2))), lambda log: list(log.records(session="s1")), lambda log: log.get_state("x"),
    lambda log: list(log.records(key(2), "s1")),
])  # fmt: skip
def test_questions_about_one_task_look_at_nothing_else(log: TuningLog, call: Callable[[TuningLog], object]) -> None:
    for query, plan in _plans(log, lambda: call(log)):
        if "sqlite_master" in query:
            continue
        assert "SEARCH" in plan and not re.search(r"SCAN (records|workloads|state)", plan), (query, plan)
        assert "TEMP B-TREE" not in plan or "id" in query.partition("ORDER BY")[2], (query, plan)


def test_the_summary_is_read_from_an_index_alone(log: TuningLog) -> None:
    grouped = [(q, p) for q, p in _plans(log, log.tasks) if "GROUP BY" in q]
    assert grouped and all("COVERING INDEX" in p and "TEMP B-TREE" not in p for _, p in grouped)
    assert all("COVERING INDEX" in p for _, p in _plans(log, log.count))
