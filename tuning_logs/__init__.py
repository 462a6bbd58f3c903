"""Tuning logs that ship with mlc: one folder for each family of targets, ``x86-64-v4/*.jsonl``.

:mod:`tuning_logs.ship` and :mod:`tuning_logs.samples` make them; nothing in mlc imports these two.
"""
