"""Flags with which XLA compiles the tests' small programs quickly; imported before JAX."""

from importlib import metadata

# LLVM's optimizations and MLIR's fusions take half of the compilation, and cutting a program into
# parts for more cores than there are a fifth.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
# Options for programs that run for longer than they compile.
OPTIMIZED: dict[str, int | bool] = {"xla_backend_optimization_level": 1}
if metadata.version("jax").startswith("0.10."):  # later versions have no such option
    QUICK += " --xla_cpu_use_fusion_emitters=false"
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True
