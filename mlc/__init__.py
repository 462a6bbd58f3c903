"""mlc: a tensor-program autotuning compiler on Apache TVM."""
