"""The workload of a task (its function), stored beside its records so that a log alone can train a cost model.

A record holds how a function was scheduled, not the function. Its workload is stored once for each task, as TVM's own
JSON text of the normalised function, with what of the model decides its time (which parameters are weights, and how
much of them one run reads).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlc.log import codec

if TYPE_CHECKING:
    from mlc.graph.task import Task

__all__ = ["Workload", "parse_workload", "workload_text"]


@dataclass(frozen=True)
class Workload:
    """``func`` is the function as :func:`mlc.graph.task.to_json` writes it, ``target`` the target's attributes as JSON.

    ``constants`` and ``constant_bytes`` are as in :class:`mlc.graph.task.Task`.
    """

    task_key: str
    task_name: str
    func: str
    target: str
    constants: tuple[int, ...] = ()
    constant_bytes: int = 0

    @staticmethod
    def of(task: Task) -> Workload:
        """The workload of a task."""
        from mlc.graph.task import to_json

        return Workload(
            task.key, task.name, to_json(task.func), task.target.attrs, tuple(task.constants), task.constant_bytes
        )

    def task(self) -> Task:
        """The task again; raises ``ValueError`` where the text is no function, or another one than the key says."""
        from mlc.graph.task import Task, from_json
        from mlc.target import Target
        from schedules.tvm_json import check_graph

        check_graph(self.func)
        try:
            func = from_json(self.func)
        except Exception as error:  # TVM's reader raises whatever the fields make it
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"the function of {self.task_name} must be one that TVM reads, but {lines[-1]}") from error
        digest, _, rest = self.task_key.partition("-")
        name = rest.removesuffix(f"-{codec.versions_of(self.task_key)}")
        task = Task(self.task_name, func, Target(name, self.target), 1, "", self.constants, self.constant_bytes)
        if digest not in (key.partition("-")[0] for key in task.keys):
            raise ValueError(f"the function of {self.task_name} must have the hash {digest} of its task's key, but has "
                             f"{task.key.partition('-')[0]}; it was altered, or written by another TVM")
        return task


def workload_text(workload: Workload) -> str:
    """The workload as JSON in one spelling; raises :class:`~mlc.log.codec.MalformedRecord`."""
    values = _checked({**asdict(workload), "constants": list(workload.constants)})
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def parse_workload(text: str) -> Workload:
    """Inverse of :func:`workload_text`; raises :class:`~mlc.log.codec.MalformedRecord`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise codec.MalformedRecord(f"a workload must be JSON, got {text[:40]!r} ({error})") from None
    values = _checked(values)
    return Workload(**{**values, "constants": tuple(values["constants"])})


def _checked(values: Any) -> dict[str, Any]:
    fields = ("task_key", "task_name", "func", "target")
    if not isinstance(values, dict) or set(values) != {*fields, "constants", "constant_bytes"}:
        raise codec.MalformedRecord(f"a workload has the fields {', '.join(fields)}, constants and constant_bytes")
    for name in fields:
        if not isinstance(values[name], str):
            raise codec.MalformedRecord(f"a workload's {name} must be text, got {type(values[name]).__name__}")
    if not values["task_key"]:
        raise codec.MalformedRecord("a workload's task_key must not be empty")
    numbers = values["constants"]
    if not isinstance(numbers, list) or not all(map(_is_natural, [*numbers, values["constant_bytes"]])):
        raise codec.MalformedRecord("a workload's constants must be positions and constant_bytes a size")
    return values


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
