"""The machine that a process runs on: its CPUs, accelerators, memory pages, and JAX on it."""
