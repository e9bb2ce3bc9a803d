"""`minimax-train bench`: how fast answers are drawn and learned from on this device, and how close
to its limits. Weights are random (`minimax_jax.random_model`), the programs those of GRPO.
"""
