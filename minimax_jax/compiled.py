"""Compiled programs kept on disk, so that a second start of a command is faster."""

from pathlib import Path

import jax

FOLDER = Path("~/.cache/minimax-jax/compiled").expanduser()


def keep_compiled_programs() -> None:
    """Turns on JAX's compilation cache for this process; called by commands, never on import.

    A folder that is configured already (`JAX_COMPILATION_CACHE_DIR`) stays.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(FOLDER))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
