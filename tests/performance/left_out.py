"""A model as one that nothing is known of: its tasks, and what ships for the tasks of all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlc.graph.task import Task
    from mlc.log import Layers

__all__ = ["LeftOut"]


class LeftOut:
    """``imported`` is the built-in model and ``target`` what it is built for, ``own`` the keys of every task that it
    may have, ``others`` the shipped records of all other tasks."""

    def __init__(self, model: str, target: str = "native") -> None:
        from mlc import api
        from mlc.log import Layers
        from mlc.log.layers import MemoryLog
        from mlc.log.shipped import shipped_records
        from mlc.testing.models import test_model

        self.imported, self.target = api._imported(test_model(model), target, None, None, None)
        shipped = shipped_records(self.target)
        known = Layers([]), Layers([MemoryLog(shipped)])
        self.own = {task.key for layers in known for task in self.tasks(layers)}
        self.others = Layers([MemoryLog([r for r in shipped if r.task_key not in self.own])])

    def tasks(self, known: Layers) -> list[Task]:
        """The tasks of the model as it is built with ``known``, their alternatives among them."""
        from mlc.graph.tasks import extract_tasks, with_alternatives
        from mlc.log import Prices

        asked = Prices(known)
        return with_alternatives(extract_tasks(self.optimised(asked), self.target), asked.alternatives)

    def optimised(self, prices: Any) -> Any:
        """The fused module whose alternatives are chosen by ``prices``."""
        from mlc import api

        return api._optimised(self.imported, self.target, prices, None)
