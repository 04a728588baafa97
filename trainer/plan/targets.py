"""GPUs that programs can be compiled for without having one, with their speeds.

Figures are the vendor's published ones, which are decimal (80 GB = 80e9 bytes): a
little less than a device reports. Limits of threads, registers and shared memory are
from the tables of compute capabilities in the CUDA C++ Programming Guide.
"""

from dataclasses import dataclass, replace

from trainer.errors import UserError
from trainer.text import nearest

GPUS_PER_HOST = 8  # of an HGX or DGX system


@dataclass(frozen=True)
class Target:
    """One kind of GPU, in a system of eight.

    Attributes:
      device: as in `jax.Device.device_kind`; `peak_flops` looks up its rates by it.
      capability: CUDA compute capability.
      sm_count: number of streaming multiprocessors (SMs).
      fp32_units_per_sm: FP32 units of an SM.
      clock_ghz: the boost clock.
      memory: bytes.
      bandwidth: of the memory, bytes per second.
      l2: bytes of the L2 cache.
      shared_memory: bytes of shared memory of an SM; a block may have 1 KiB less.
      max_threads_per_sm: threads that an SM holds at once.
      links: NVLinks; 0: PCI Express.
      link_bandwidth: of all links together, bytes per second in each direction.
      network: between hosts, bytes per second of each GPU in each direction.
    """

    device: str
    capability: tuple[int, int]
    sm_count: int
    fp32_units_per_sm: int
    clock_ghz: float
    memory: int
    bandwidth: float
    l2: int
    shared_memory: int
    max_threads_per_sm: int
    links: int
    link_bandwidth: float
    network: float

    @property
    def text_proto(self) -> str:
        """The GpuTargetConfig that XLA's compiler takes in place of a device."""
        major, minor = self.capability
        # Enables the instructions of one generation only, such as Hopper's wgmma.
        extension = "ACCELERATED_FEATURES" if self.capability >= (9, 0) else "NONE"
        # CUDA's limits that are written out are equal for all capabilities from 8.0 on.
        # The bandwidth of PCI Express is that of version 5.0 with 16 lanes for all.
        return f"""
gpu_device_info {{
  name: "{self.device}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {self.sm_count}
  fpus_per_core: {self.fp32_units_per_sm}
  clock_rate_ghz: {self.clock_ghz}
  memory_bandwidth: {self.bandwidth:.0f}
  device_memory_size: {self.memory}
  l2_cache_size: {self.l2}
  shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_block_optin: {self.shared_memory - 1024}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {self.max_threads_per_sm}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  pcie_bandwidth: 64000000000
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {self.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.device}"
"""


CUDNN_VERSION = 91000  # the one of `Target.text_proto`

KIB, MIB = 2**10, 2**20
# NVIDIA H100 data sheet (SXM) and H100 Tensor Core GPU Architecture (white paper); DGX
# H100 data sheet.
H100 = Target(
    "NVIDIA H100 80GB HBM3",
    (9, 0),
    sm_count=132,
    fp32_units_per_sm=128,
    clock_ghz=1.98,
    memory=80 * 10**9,
    bandwidth=3.35e12,
    l2=50 * MIB,
    shared_memory=228 * KIB,
    max_threads_per_sm=2048,
    links=18,
    link_bandwidth=450e9,
    # A DGX has an adapter of 400 Gbit/s for each GPU.
    network=50e9,
)
# NVIDIA Blackwell Architecture Technical Brief and DGX B200 data sheet: 1,440 GB and 64
# TB/s over eight.
B200 = Target(
    "NVIDIA B200",
    (10, 0),
    sm_count=148,
    fp32_units_per_sm=128,
    clock_ghz=1.965,
    memory=180 * 10**9,
    bandwidth=8e12,
    l2=126 * MIB,
    shared_memory=228 * KIB,
    max_threads_per_sm=2048,
    links=18,
    link_bandwidth=900e9,
    network=50e9,
)
TARGETS = {
    # NVIDIA A100 data sheet (80GB SXM) and A100 Tensor Core GPU Architecture (white
    # paper); DGX A100 data sheet.
    "a100": Target(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        sm_count=108,
        fp32_units_per_sm=64,
        clock_ghz=1.41,
        memory=80 * 10**9,
        bandwidth=2.039e12,
        l2=40 * MIB,
        shared_memory=164 * KIB,
        max_threads_per_sm=2048,
        links=12,
        link_bandwidth=300e9,
        # A DGX A100 has an adapter of 200 Gbit/s for each GPU.
        network=25e9,
    ),
    # NVIDIA L40S data sheet and Ada GPU Architecture (white paper), also of the RTX
    # 4090; links are PCI Express 4.0 of 16 lanes.
    "l40s": Target(
        "NVIDIA L40S",
        (8, 9),
        sm_count=142,
        fp32_units_per_sm=128,
        clock_ghz=2.52,
        memory=48 * 10**9,
        bandwidth=864e9,
        l2=96 * MIB,
        shared_memory=100 * KIB,
        max_threads_per_sm=1536,
        links=0,
        link_bandwidth=32e9,
        network=25e9,
    ),
    "rtx4090": Target(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        sm_count=128,
        fp32_units_per_sm=128,
        clock_ghz=2.52,
        memory=24 * 10**9,
        bandwidth=1.008e12,
        l2=72 * MIB,
        shared_memory=100 * KIB,
        max_threads_per_sm=1536,
        links=0,
        link_bandwidth=32e9,
        network=12.5e9,
    ),
    "h100": H100,
    # NVIDIA H200 data sheet (SXM); the processor is the H100's. DGX H200 data sheet.
    "h200": replace(H100, device="NVIDIA H200", memory=141 * 10**9, bandwidth=4.8e12),
    "b200": B200,
    # NVIDIA HGX B300 and DGX B300 data sheets, "Inside NVIDIA Blackwell Ultra" (blog):
    # matmuls of 8 and 16 bits as B200.
    "b300": replace(
        B200,
        device="NVIDIA B300",
        capability=(10, 3),
        sm_count=160,
        memory=288 * 10**9,
        # A DGX B300 has an adapter of 800 Gbit/s for each GPU.
        network=100e9,
    ),
    # NVIDIA RTX Blackwell GPU Architecture (white paper); PCI Express 5.0 of 16 lanes.
    "rtx5090": Target(
        "NVIDIA GeForce RTX 5090",
        (12, 0),
        sm_count=170,
        fp32_units_per_sm=128,
        clock_ghz=2.407,
        memory=32 * 10**9,
        bandwidth=1.792e12,
        l2=96 * MIB,
        shared_memory=100 * KIB,
        max_threads_per_sm=1536,
        links=0,
        link_bandwidth=64e9,
        network=12.5e9,
    ),
}


def get_target(name: str) -> Target:
    """Return a target by name; UserError lists the valid ones."""
    if name not in TARGETS:
        raise UserError(f"target={name} is not known; {nearest(name, list(TARGETS))}")
    return TARGETS[name]
