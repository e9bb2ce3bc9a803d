"""Log-probabilities and entropies in chunks, and what the states before the head get back."""

import jax
import jax.numpy as jnp
import numpy as np

from rl import token_statistics as module
from rl.token_statistics import frozen_head_statistics, token_statistics
from tests.numerics import assert_close
from tests.rl.grpo_toy import toy_loaded


def test_beside_a_frozen_head_values_and_gradient_are_the_same(monkeypatch):
    """At a temperature, with chunks that do not divide the rows."""
    monkeypatch.setattr(module, "CHUNK_ROWS", 7)
    model, rng = toy_loaded().model, np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((3, 5, model.config.hidden_size)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, model.config.num_tokens, (3, 5)))
    weights = rng.standard_normal(15)

    def of_any(hidden):
        return token_statistics(model, None, hidden, targets, 0.6)

    def of_frozen(hidden):
        return frozen_head_statistics(model, hidden, targets, 0.6)

    def loss(hidden, statistics):
        logprobs, entropies = statistics(hidden)
        return jnp.sum(weights * logprobs) + jnp.sum(entropies), (logprobs, entropies)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, expected), of_hidden = run(hidden, of_any)
    (_, found), other = run(hidden, of_frozen)
    for one, two in zip(found, expected, strict=True):
        assert_close(one, two, "f32")
    exact = jax.nn.log_softmax(model.logits(hidden) / 0.6, axis=-1).reshape(15, -1)
    assert_close(found[0], np.asarray(exact)[np.arange(15), targets.reshape(15)], "f32")
    assert_close(other, of_hidden, "f32")
