"""What a run is made of, as frozen dataclasses; knows nothing of jax."""
