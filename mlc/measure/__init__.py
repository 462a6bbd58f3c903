"""Builds, runs and times candidates, on this machine or on a fleet, in processes that may crash, hang or return
garbage."""

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
