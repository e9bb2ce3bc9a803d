"""The drafter in numpy float64, one sequence at a time, from the equations of spec/dspark 1.3.

Nothing of the project's arithmetic: weights come as arrays by their paths, context is dense.
"""

from dataclasses import dataclass

import numpy as np

from configs.model import ModelConfig
from minimax_jax.checkpoint import parameters_of
from minimax_jax.drafter import Drafter
from tests.ops.oracles import attend, gemma_norm, rotate


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@dataclass(frozen=True)
class Reference:
    """The drafter's weights in float64; context and block of one sequence."""

    weights: dict[str, np.ndarray]
    config: ModelConfig

    @classmethod
    def of(cls, drafter: Drafter, config: ModelConfig) -> "Reference":
        parameters = parameters_of(drafter).items()
        return cls({path: np.asarray(p.get_value(), np.float64) for path, p in parameters}, config)

    def linear(self, name, x):
        return np.asarray(x, np.float64) @ self.weights[f"{name}.weight"].T

    def norm(self, name, x):
        return gemma_norm(x, self.weights[f"{name}.weight"], self.config.drafter.norm_eps)

    def fused(self, taps):
        """(b): hidden_norm(fc(concatenated streams [S, D]))."""
        return self.norm("hidden_norm", self.linear("fc", np.concatenate(taps, axis=-1)))

    def heads(self, layer, projection, x):
        a = self.config.drafter.attention
        projected = self.linear(f"layers.{layer}.attention.{projection}", x)
        return projected.reshape(len(x), projected.shape[1] // a.head_dim, a.head_dim)

    def rotated(self, layer, norm, x, positions):
        """Per-head norm, then rotation of the first dimensions."""
        a = self.config.drafter.attention
        y = self.norm(f"layers.{layer}.attention.{norm}", x)
        for t, head in np.ndindex(y.shape[:2]):
            y[t, head] = rotate(y[t, head], positions[t], a.rotary_dim, a.rope_theta)
        return y

    def keys_and_values(self, layer, x, positions):
        """(c) of the fused context, and the same of a block's normed stream: [S, K, H] each."""
        k = self.rotated(layer, "k_norm", self.heads(layer, "k_proj", x), positions)
        return k, self.heads(layer, "v_proj", x)

    def attention(self, layer, y, context_k, context_v, start):
        """(e) 1-2: rows at start, start + 1, ... see their window of context and all the block."""
        a, window = self.config.drafter.attention, self.config.drafter.window
        positions = start + np.arange(len(y))
        q = self.rotated(layer, "q_norm", self.heads(layer, "q_proj", y), positions)
        own_k, own_v = self.keys_and_values(layer, y, positions)
        out = np.zeros(q.shape)
        for i, n in np.ndindex(q.shape[:2]):
            head, left = n // (a.num_heads // a.num_kv_heads), positions[i] - (window - 1)
            seen = slice(max(left, 0), start)
            keys = np.concatenate([context_k[seen, head], own_k[:, head]])
            values = np.concatenate([context_v[seen, head], own_v[:, head]])
            out[i, n], _ = attend(q[i, n], keys, values, a.head_dim**-0.5)
        return self.linear(f"layers.{layer}.attention.o_proj", out.reshape(len(y), -1))

    def mlp(self, layer, y):
        """SwiGLU-OAI: the gate is clamped from above only."""
        c, name = self.config.drafter.mlp, f"layers.{layer}.mlp"
        gate = np.minimum(self.linear(f"{name}.gate_proj", y), c.limit)
        up = np.clip(self.linear(f"{name}.up_proj", y), -c.limit, c.limit)
        return self.linear(f"{name}.down_proj", gate * sigmoid(c.alpha * gate) * (up + c.beta))

    def layer(self, layer, x, context_k, context_v, start):
        """(e): pre-norm, two residuals."""
        x = np.asarray(x, np.float64)
        y = self.norm(f"layers.{layer}.input_norm", x)
        x = x + self.attention(layer, y, context_k, context_v, start)
        return x + self.mlp(layer, self.norm(f"layers.{layer}.post_attention_norm", x))

    def hidden(self, x, taps):
        """(e)-(f) of an embedded block [T, D] after a context of streams [S, D]."""
        start, c = len(taps[0]), self.fused(taps)
        for layer in range(self.config.drafter.num_layers):
            keys = self.keys_and_values(layer, c, np.arange(start))
            x = self.layer(layer, x, *keys, start)
        return self.norm("norm", x)

    def chain(self, hidden, head_VD, anchor):
        """(f)-(h), greedily: drafts [T], corrected logits [T, V], confidence logits [T]."""
        tokens, logits, confidence, previous = [], [], [], anchor
        for row in hidden:
            e = self.weights["markov.w1"][previous]
            z = head_VD @ row + self.weights["markov.w2.weight"] @ e
            z[self.config.num_tokens :] = -np.inf
            both = np.concatenate([row, e])
            logit = self.weights["confidence.weight"][0] @ both + self.weights["confidence.bias"][0]
            previous = int(z.argmax())
            tokens.append(previous), logits.append(z), confidence.append(logit)
        return np.array(tokens), np.stack(logits), np.array(confidence)
