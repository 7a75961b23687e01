"""Clusters of GPUs to plan for: nodes of GPUs, and their links.

Sources: NVIDIA's data sheets of the H100 SXM5 and the H200 SXM (peaks without sparsity, memory,
NVLink) and the tables of compute capability 9.0 in the CUDA C++ programming guide. Between nodes:
one network adapter of 400 Gb/s a GPU, as in NVIDIA's DGX H100. A link's speed is that of one
direction.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        description: as CUDA calls it. node: GPUs a node at most, linked with each other.
        memory_bytes: available to programs under CUDA.
        bfloat16_flops, tf32_flops: peak of dense products, a second. XLA multiplies float32 in
            TF32 by default.
        memory_speed: bytes a second. clock_hz: the highest.
        nvlink_bytes: to the GPUs of its node; network_bytes: to other nodes; a second, a GPU.
        multiprocessors, l2_bytes: of the GPU.
    """

    name: str
    description: str
    node: int
    memory_bytes: int
    bfloat16_flops: float
    tf32_flops: float
    memory_speed: float
    clock_hz: float
    nvlink_bytes: float
    network_bytes: float
    multiprocessors: int
    l2_bytes: int

    device_name = "GPU"

    def device_flops(self, dtype: str = "bfloat16") -> float:
        """The peak of products of numbers of this type."""
        return self.bfloat16_flops if dtype == "bfloat16" else self.tf32_flops

    @property
    def target_config(self) -> str:
        """XLA's `GpuTargetConfigProto`, as text: it stands for the device.

        Constants of compute capability 9.0, and what differs from GPU to GPU.
        """
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.description}"
            dnn_version_info {{ major: 9 minor: 8 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: 9 minor: 0 }}
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: 232448
              shared_memory_per_core: 233472
              fpus_per_core: 128
              core_count: {self.multiprocessors}
              l2_cache_size: {self.l2_bytes}
              clock_rate_ghz: {self.clock_hz / 1e9}
              memory_bandwidth: {int(self.memory_speed)}
              device_memory_size: {self.memory_bytes}
            }}
        """


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            *("h100", "NVIDIA H100 80GB HBM3", 8, int(79.1 * GIB)),
            *(989e12, 495e12, 3.35e12, 1.98e9, 450e9, 50e9, 132, 50 * 2**20),
        ),
        Gpu(
            *("h200", "NVIDIA H200", 8, int(139.8 * GIB)),
            *(989e12, 495e12, 4.8e12, 1.98e9, 450e9, 50e9, 132, 50 * 2**20),
        ),
    )
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs: h100:16x8 is 16 nodes of 8 GPUs, 128 devices."""

    chip: Gpu
    nodes: int
    gpus: int

    platform = "cuda"

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{self.nodes}x{self.gpus}"

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus

    @property
    def chips(self) -> int:
        return self.devices

    @property
    def device_bytes(self) -> int:
        return self.chip.memory_bytes
