"""Nodes of a Ray cluster as devices: one actor on each node that provides the machine class.

``mlc worker --class NAME`` makes a node provide the resource ``mlc-NAME``, of which an actor takes all, so that two
sessions never measure on one node. Ray reaches its nodes by gRPC and unpickles what comes, so clusters that mlc starts
ask for the token ``MLC_TOKEN`` (Ray's token authentication). Those of this machine alone listen on the loopback address
(:func:`loopback`); the processes of others listen on all.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlc.config import get, physical_cores
from mlc.errors import MeasureError, UsageError
from mlc.measure.executor import Job
from mlc.measure.fleet import Answered, Gone, Joined
from mlc.measure.node import Node
from mlc.measure.wire import description_of, job_text, results_of

__all__ = ["LOOPBACK", "PREFIX", "RayDevices", "authentication", "class_of", "loopback", "need_ray", "options"]

#: the name of a node's resource before that of its class
PREFIX = "mlc-"
LOOPBACK = "127.0.0.1"
#: seconds between two looks for nodes that have come
_LOOK = 2.0
#: seconds in which a cluster's address must be open
_KNOCK = 10.0
#: bytes of shared memory: messages are small
_STORE = 80_000_000
_LOCAL_CLASS = "local"

#: Ray neither warns on standard error and standard output, which are ours (it would tell of each node that dies in the
#: midst of a command's JSON), nor reports its use
_QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}

#: Ray takes the address by which other machines reach this one, whatever it is told, unless it has no such clusters;
#: then its servers bind to the loopback address
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

Happening = Joined | Gone | Answered


def need_ray() -> Any:
    """Ray, or :class:`MeasureError` with the way to it."""
    try:
        import ray
    except ImportError:
        raise MeasureError("Ray must be installed for this, but is not; run `pip install 'mlc[ray]'`") from None
    return ray


def authentication() -> dict[str, str]:
    """Variables by which Ray asks for the token and shows it; without ``MLC_TOKEN`` it does as it is set up to do."""
    token = get("MLC_TOKEN")
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}


def loopback(address: str) -> dict[str, str]:
    """Variables by which Ray's processes listen on the loopback address alone, if ``address`` (HOST:PORT, or empty for
    a cluster that begins here) is there."""
    return dict(_ALONE) if address.rpartition(":")[0] in ("", LOOPBACK, "localhost") else {}


def options(class_name: str) -> dict[str, Any]:
    """How a node of a class presents itself."""
    return {"num_cpus": physical_cores(), "object_store_memory": _STORE, "resources": {PREFIX + class_name: 1}}


def class_of(resources: Mapping[str, float]) -> str:
    """The class that a node's resources name; empty for none."""
    return next((name[len(PREFIX) :] for name in sorted(resources) if name.startswith(PREFIX)), "")


@dataclass
class _Node:
    name: str
    id: str
    actor: Any
    described: Any  # until it is ready, the reference of what it will say of itself
    ready: bool = False
    work: dict[Any, str] = field(default_factory=dict)  # job by reference


class RayDevices:
    """Implements :class:`mlc.measure.fleet.Devices`. ``address`` is ``HOST:PORT`` of a cluster, empty for the one that
    runs here, else for one that is started and ended with this object. ``class_name`` may be left out where the
    cluster has one class only.

    Raises :class:`MeasureError` where there is no Ray or no such cluster, and :class:`UsageError` where the class is
    not to be told.
    """

    def __init__(self, address: str = "", class_name: str = "") -> None:
        # Ray reads its settings when it is imported, and never again
        os.environ.update({name: os.environ.get(name, value) for name, value in _QUIET.items()})
        os.environ.update(loopback(address) | (authentication() or ({} if address else _own_token())))
        ray = self._ray = need_ray()
        self._connect(address)
        self._nodes: dict[str, _Node] = {}
        self._taken: set[str] = set()  # by Ray's id
        self._gone: list[Gone] = []
        self._actor = ray.remote(Node)
        self._looked = -_LOOK
        try:
            self._class = class_name or self._only_class()
        except BaseException:
            self.close()
            raise

    def poll(self, timeout: float) -> list[Happening]:
        """See :class:`mlc.measure.fleet.Devices`; Ray itself reports nodes that die while they work."""
        deadline = time.monotonic() + timeout
        while True:
            self._look()
            found = self._happened(max(0.0, min(deadline - time.monotonic(), _LOOK)))
            if found or time.monotonic() >= deadline:
                return found

    def expect(self, jobs: Sequence[Job]) -> None:
        """Nodes build what they measure."""

    def begin(self, device: str, job: Job) -> None:
        node = self._nodes[device]
        node.work[node.actor.run.remote(job_text(job))] = job.id

    def drop(self, device: str) -> None:
        node = self._nodes.pop(device, None)
        if node is not None:
            self._ray.kill(node.actor)

    def close(self) -> None:
        if self._ray.is_initialized():
            for name in list(self._nodes):
                self.drop(name)
            self._ray.shutdown()

    def _connect(self, address: str) -> None:
        common = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "mlc"}
        try:
            if address:
                host, _, port = address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), _KNOCK).close()  # Ray itself waits for minutes
                self._ray.init(address=address, **common)
                return
            try:
                if not get("MLC_TOKEN"):
                    raise ConnectionError("a cluster that runs here has a token that is not known")
                self._ray.init(address="auto", **common)
            except ConnectionError:
                self._ray.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, **common,
                               **options(_LOCAL_CLASS))
        except Exception as error:
            raise MeasureError(
                f"a Ray cluster must answer at {address or 'this machine'}, but does not ({_last_line(error)}); start "
                "one with `mlc worker --class NAME`, and let both sides have the same MLC_TOKEN") from error

    def _only_class(self) -> str:
        classes = sorted({class_of(node["Resources"]) for node in self._alive()} - {""})
        if len(classes) == 1:
            return classes[0]
        if not classes:
            raise MeasureError("a node of the cluster must offer a machine class, but none does; start nodes with "
                               "`mlc worker --class NAME`")
        raise UsageError(f"the machine class must be named where there are several, {', '.join(classes)}; give "
                         f"ray://HOST:PORT/{classes[0]}, for example")

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _look(self) -> None:
        """Ask nodes that have come for an actor."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        alive = {node["NodeID"]: node for node in self._alive()}
        for identity, node in alive.items():
            if identity not in self._taken and PREFIX + self._class in node["Resources"]:
                self._taken.add(identity)
                actor = self._actor.options(
                    num_cpus=0, resources={PREFIX + self._class: 1}, max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(identity, soft=False),
                ).remote()
                name = f"{node['NodeManagerHostname']}/{identity[:6]}"
                self._nodes[name] = _Node(name, identity, actor, actor.describe.remote())
        for device in [node for node in self._nodes.values() if node.id not in alive]:
            self._lost(device, "its node has left the cluster")

    def _happened(self, timeout: float) -> list[Happening]:
        waiting = {reference: node for node in self._nodes.values()
                   for reference in ([] if node.ready else [node.described]) + list(node.work)}
        found: list[Happening] = []
        if waiting:
            ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=timeout)
            if ready:  # and what else there is by now
                ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
            found = [happening for ref in ready if (happening := self._answer(waiting[ref], ref)) is not None]
        elif not self._gone:
            time.sleep(min(timeout, 0.2))
        gone, self._gone = self._gone, []
        return [*found, *gone]

    def _answer(self, node: _Node, reference: Any) -> Happening | None:
        from ray.exceptions import RayActorError, RayError, RayTaskError

        if node.name not in self._nodes:
            return None
        try:
            text = self._ray.get(reference)
            if not node.ready:
                return self._joined(node, text)
            return Answered(node.name, node.work.pop(reference), results_of(text))
        except RayTaskError as error:  # a defect of the node's, which has told of it
            if not node.ready:
                return self._refused(node, _last_line(error))
            return Answered(node.name, node.work.pop(reference), None)
        except (RayActorError, RayError) as error:
            self._lost(node, f"it died ({type(error).__name__})")
            return None
        except MeasureError as error:
            return self._refused(node, str(error))

    def _joined(self, node: _Node, text: str) -> Happening:
        from mlc.graph.task import versions

        said = description_of(text)
        if said.versions != versions():
            return self._refused(node, f"it must have the versions of the session, {versions()}, but has "
                                       f"{said.versions}; install the same mlc there")
        node.ready = True
        return Joined(node.name, f"{self._class}: {said.machine}", said.native)

    def _refused(self, node: _Node, why: str) -> Gone:
        self.drop(node.name)
        return Gone(node.name, why)

    def _lost(self, node: _Node, why: str) -> None:
        self._nodes.pop(node.name, None)
        self._taken.discard(node.id)  # the node may live, and have an actor again
        self._gone.append(Gone(node.name, why))


def _own_token() -> dict[str, str]:
    """A token for a cluster that only this process uses."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:200]


def resources_text(class_name: str) -> str:
    """A class as ``ray start`` takes it."""
    return json.dumps({PREFIX + class_name: 1})
