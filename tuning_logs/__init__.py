"""Tuning logs that ship with mlc: one folder for each target, ``llvm-znver3-2/*.jsonl`` or ``*.db``."""
