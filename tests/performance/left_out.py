"""A model as one that nothing is known of: its tasks, and what ships for the tasks of all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

__all__ = ["LeftOut"]


class LeftOut:
    """``compilation`` is of the built-in model as it is written, ``target`` what it is built for, ``own`` the keys of
    every task that it may have, ``others`` the shipped records of all other tasks."""

    def __init__(self, model: str, target: str = "native") -> None:
        from mlc.compilation import Compilation
        from mlc.log import Layers
        from mlc.log.layers import MemoryLog
        from mlc.log.shipped import shipped_records
        from mlc.networks.models import model_named

        self.compilation = Compilation.of(model_named(model), target, substitutions=False)
        self.target = self.compilation.target
        shipped = shipped_records(self.target)
        known = Layers([]), Layers([MemoryLog(shipped)])
        self.own = {task.key for layers in known for task in self.compilation.tasks(layers)}
        self.others = Layers([MemoryLog([r for r in shipped if r.task_key not in self.own])])
