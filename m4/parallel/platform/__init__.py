"""The machine of a process: its CPUs, accelerators, memory pages, and JAX's set-up."""
