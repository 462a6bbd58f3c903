"""Networks that ship as code: built-in names, the demo's, the benchmarks' and those of the ablation."""
