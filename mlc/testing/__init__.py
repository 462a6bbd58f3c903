"""Shared by tests: cases, fakes and simulators, and emulators of CUDA, AMX and aarch64. Not used by the product."""
