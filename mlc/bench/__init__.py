"""Compares engines on one model: one process each, equal thread counts, interleaved timing, outputs compared."""

from mlc.bench.engines import ENGINES, EngineSpec, expand
from mlc.bench.run import BenchEvent, BenchResult, EngineResult, Timing, run_bench

__all__ = ["ENGINES", "BenchEvent", "BenchResult", "EngineResult", "EngineSpec", "Timing", "expand", "run_bench"]
