"""Speculative decoding: what the drafter proposes, which drafts a step tests, what it commits.

The drafter itself is `minimax_jax.drafter`, the law of acceptance `minimax_jax.speculation`.
"""
