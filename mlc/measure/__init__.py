"""Builds, runs and times candidates, on this machine or on a fleet, in processes that may crash, hang or return
garbage.

- The interfaces: :mod:`measurer <mlc.measure.measurer>` (requests in, results out), :mod:`executor
  <mlc.measure.executor>` (jobs on devices), :mod:`dispatch <mlc.measure.dispatch>` between the two.
- This machine: :mod:`local <mlc.measure.local>` and :mod:`stream <mlc.measure.stream>` on a :mod:`pool
  <mlc.measure.pool>` of :mod:`worker <mlc.measure.worker>` processes, which do their jobs with a :mod:`runner
  <mlc.measure.runner>`.
- Fleets: :mod:`fleet <mlc.measure.fleet>` on ``ray_devices`` or ``rpc_devices``; the devices' side is ``node``,
  ``board`` and ``rpc_server``.
"""

from mlc.measure.dispatch import Dispatcher
from mlc.measure.executor import Answer, Executor, Job
from mlc.measure.fleet import DeviceStatus, Fleet
from mlc.measure.local import LocalMeasurer
from mlc.measure.local_executor import LocalExecutor, local_measurer
from mlc.measure.machine import load_warning, machine_id
from mlc.measure.measurer import MeasureOptions, Measurer, MeasureRequest, MeasureResult

__all__ = [
    "Answer", "DeviceStatus", "Dispatcher", "Executor", "Fleet", "Job", "LocalExecutor", "LocalMeasurer",
    "MeasureOptions", "MeasureRequest", "MeasureResult", "Measurer", "load_warning", "local_measurer", "machine_id",
]
