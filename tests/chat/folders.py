"""Where the bundled model's tokenizer and template lie."""

from pathlib import Path

TINY = Path(__file__).parents[2] / "minimax_jax" / "assets" / "tiny"
