"""How much of a GPU's memory JAX may have."""

from collections.abc import MutableMapping

_FRACTION = "0.95"  # 125 GB of weights do not fit into JAX's own default of three quarters
_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def use_all_memory(environment: MutableMapping[str, str]) -> None:
    """Lets JAX take 95 % of each GPU unless the environment says how much; called by commands,
    before anything looks for devices. The rest is for what is not JAX's own: CUDA, NCCL, graphs.
    """
    if not any(name in environment for name in _NAMES):
        environment[_NAMES[0]] = _FRACTION
