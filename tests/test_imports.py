"""No module of the product needs, by whichever way, a module that needs it: imports within functions count too."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

PACKAGES = ("mlc", "schedules", "cost_model", "tuning_logs")


def test_there_are_no_circles() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "mlc.api" in imports["mlc.cli.tune"]  # which imports it within a function
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))
