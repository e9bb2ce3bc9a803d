"""`minimax-jax bench`: how fast the steps of a model run on this device, how close to its limits,
and what the time goes into. Weights are random (`minimax_jax.random_model`).
"""
