"""The tuning log: append-only records of measured candidates, safe against crashes, torn files and other versions."""

from mlc.log.check import CheckReport, check, salvage
from mlc.log.exchange import Exchange, export_jsonl, import_jsonl, merge
from mlc.log.layers import Layers, layered
from mlc.log.price import Prices
from mlc.log.record import Record, Verdict
from mlc.log.store import LogReader, Session, TaskSummary, TuningLog
from mlc.log.workload import Workload

__all__ = [
    "CheckReport", "Exchange", "Layers", "LogReader", "Prices", "Record", "Session", "TaskSummary", "TuningLog",
    "Verdict", "Workload", "check", "export_jsonl", "import_jsonl", "layered", "merge", "salvage",
]
