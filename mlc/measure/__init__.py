"""Build, run and time candidates, somewhere that may crash, hang or lie."""

from mlc.measure.local import LocalMeasurer
from mlc.measure.machine import load_warning, machine_id
from mlc.measure.measurer import MeasureOptions, Measurer, MeasureRequest, MeasureResult

__all__ = [
    "LocalMeasurer", "MeasureOptions", "MeasureRequest", "MeasureResult", "Measurer", "load_warning", "machine_id",
]
