"""Memory of GPUs by name, in bytes.

Vendors' figures: NVIDIA's read as decimal GB (a driver may report more), AMD's are GiB.
"""

GB = 10**9
GIB = 2**30

GPUS = {
    # docs.nvidia.com, GenMol NIM 2.0.0, "Support Matrix", column "GPU Memory"
    "h100": 80 * GB,
    "h200": 141 * GB,
    "b200": 180 * GB,
    "gb200": 186 * GB,
    "b300": 288 * GB,
    "gb300": 288 * GB,
    # rocm.docs.amd.com 7.13, "AMD GPU specifications", column "VRAM (GiB)"
    "mi300x": 192 * GIB,
    "mi325x": 256 * GIB,
    "mi350x": 288 * GIB,
    "mi355x": 288 * GIB,
}


def gpu_memory(name: str) -> int:
    """Bytes of a GPU; ValueError with the known names for an unknown one."""
    if name.lower() not in GPUS:
        raise ValueError(f"GPU {name!r} is not one of {', '.join(GPUS)}")
    return GPUS[name.lower()]
