"""Tuning logs that ship with mlc: one folder for each family of targets, ``x86-64-v4/*.jsonl``."""
