"""The table of whole models while they are tuned."""

from __future__ import annotations

from typing import Any

from tests.performance.bench_models import markdown


def row() -> dict[str, Any]:
    runs = {
        "empty": {"seconds": 90.0, "trials": 200, "reason": "finished", "builds": {"0": "a", "100": "b", "200": "c"},
                  "steps": [[64, 20.0, 2e-3], [128, 45.0, 1.5e-3], [200, 80.0, 1e-3]]},
        "others": {"seconds": 50.0, "trials": 60, "reason": "seconds", "builds": {"0": "d", "60": "e"}, "steps": []},
    }
    times = {"empty 0": 2.0, "empty 100": 1.5, "empty 200": 1.0, "others 0": 1.25, "others 60": 0.8,
             "onnxruntime": 3.0, "openvino": 2.4}
    results = [{"engine": name, "median_ms": time, "max_rel_err": 1e-6} for name, time in times.items()]
    return {"model": "net", "runs": runs, "results": results}


def test_each_build_is_compared_with_the_best_peer_and_with_the_end_of_the_empty_logs_run() -> None:
    lines = markdown([row()]).splitlines()[2:]
    assert lines[0] == "| net | empty | 0 | 0 s | 2 | 1.20 | 2.000 | 1e-06 |"
    assert lines[1] == "| net | empty | 100 | 45 s | 1.5 | 1.60 | 1.500 | 1e-06 |"  # the first batch with 100 trials
    assert lines[2] == "| net | empty | 200 (finished) | 90 s | 1 | 2.40 | 1.000 | 1e-06 |"
    assert lines[4] == "| net | others | 60 (seconds) | 50 s | 0.8 | 3.00 | 0.800 | 1e-06 |"
