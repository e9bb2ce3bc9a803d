"""Before training: that rollout and trainer run the same weights, choose the same experts, compute
the same log-probabilities, and that what is trained is really used by the rollout.

The checks run on a policy that was shaken, so that a new adapter, which changes nothing, cannot
hide a rollout without one (spec/rl 4.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.table import Table

from minimax_jax.quantize import path_of_leaf
from rl.batches import Asker, sample_seeds
from rl.experience import Experience, pack_experience
from rl.grpo_metrics import combined
from rl.grpo_run import GRPORun
from rl.grpo_step import accumulate
from rl.optimizer import Parameters
from rl.policy import Policy, published
from rl.rollouts import Rollout, check_rollouts

SHAKE = 0.02  # standard deviation of what is added to each number
LEAST_OVERLAP = 0.98  # of the experts that both sides choose, over all tokens and layers
LEAST_EFFECT = 3.0  # without what is trained, log-probabilities are this much further off


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: what was found, what was wanted, and whether it holds."""

    name: str
    found: str
    wanted: str
    holds: bool
    of: Literal["weights", "numbers"] = "numbers"  # numbers: what both sides compute with them


def self_checks(run: GRPORun, asker: Asker, parameters: Parameters) -> list[Check]:
    """All checks, in one rollout of the first questions; with `rollout_cache` only those of the
    weights are demanded.
    """
    shaken = _shaken(parameters, run.config.seed)
    model, adapter = published(run.loaded.model, shaken, run.config)
    policy = Policy(model=model, adapter=adapter, version=0)
    checks = _weights(run, shaken, policy)
    rollouts = _probe(run, asker, policy)
    found = _metrics(run, shaken, rollouts)
    apart, most = (found[f"rollout_corr/logprob_abs_diff{name}"] for name in ("", "_max"))
    if run.config.replay:
        overlap = found["routing/overlap_mean"]
        checks.append(
            Check(
                name="experts chosen by both sides",
                found=f"{overlap:.6f}, {found['routing/flip_frac']:.2e} of the choices differ",
                wanted=f"at least {LEAST_OVERLAP}",
                holds=overlap >= LEAST_OVERLAP,
            )
        )
    limit = run.config.check_tolerance
    checks.append(
        Check(
            name="log-probabilities",
            found=f"mean |difference| {apart:.2e}, largest {most:.2e}, "
            f"k3 {found['rollout_corr/k3_kl']:.2e}",
            wanted=f"mean at most {limit:g}",
            holds=apart <= limit,
        )
    )
    without = _metrics(run, parameters, rollouts)["rollout_corr/logprob_abs_diff"]
    checks.append(
        Check(
            name="the rollout uses what is trained",
            found=f"mean |difference| {without:.2e} to the model without it",
            wanted=f"at least {LEAST_EFFECT:g} times the {apart:.2e} with it",
            holds=without >= LEAST_EFFECT * apart,
        )
    )
    cache = run.config.rollout_cache
    if cache is None:
        return checks
    return [one if one.of == "weights" else _told(one, cache) for one in checks]


def checks_table(checks: Sequence[Check]) -> Table:
    """The checks for the terminal."""
    table = Table("check", "found", "wanted", "", title="before training")
    for check in checks:
        table.add_row(check.name, check.found, check.wanted, "ok" if check.holds else "FAILS")
    return table


def digests(tree: Any) -> dict[str, tuple[int, int]]:
    """Two sums over the bytes of each array, by name: equal for equal arrays on any device, and
    different after any single change.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    # one after the other: on a mesh of CPU devices, programs that exchange and run at once may
    # wait for one another for ever
    found = [jax.device_get(_digest(x)) for _, x in paths]
    names = [path_of_leaf(path) for path, _ in paths]
    return {name: (int(a), int(b)) for name, (a, b) in zip(names, found, strict=True)}


@jax.jit
def _digest(x: Array) -> tuple[Array, Array]:
    """The sum of the bytes, and of the bytes times their place, both modulo 2^32."""
    raw = jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype != jnp.uint8 else x
    flat = raw.reshape(-1).astype(jnp.uint32)
    places = jnp.arange(flat.size, dtype=jnp.uint32) * jnp.uint32(2) + jnp.uint32(1)
    return jnp.sum(flat, dtype=jnp.uint32), jnp.sum(flat * places, dtype=jnp.uint32)


def _told(check: Check, cache: str) -> Check:
    """A check of numbers, of which nothing is wanted where a mismatch is studied on purpose."""
    return replace(check, wanted=f"nothing, with rollout_cache={cache}", holds=True)


def _weights(run: GRPORun, parameters: Parameters, policy: Policy) -> list[Check]:
    """Every array of the rollout's model against the trainer's, and whether one changed number of
    one array is noticed as that one.
    """
    ours = digests(published(run.loaded.model, parameters, run.config))
    theirs = digests((policy.model, policy.adapter))
    differ = [name for name in ours if ours[name] != theirs.get(name)]
    name, x = sorted(parameters.items())[0]
    changed = {**parameters, name: x.at[(0,) * x.ndim].add(1.0)}
    moved = digests(published(run.loaded.model, changed, run.config))
    noticed = [name for name in ours if ours[name] != moved[name]]
    return [
        Check(
            name="arrays of both sides by digest",
            found=f"{len(differ)} of {len(ours)} differ" + "".join(f", {n}" for n in differ[:3]),
            wanted="none",
            holds=not differ and ours.keys() == theirs.keys(),
            of="weights",
        ),
        Check(
            name=f"one number of {name} changed",
            found=f"{len(noticed)} arrays differ",
            wanted="exactly one",
            holds=len(noticed) == 1,
            of="weights",
        ),
    ]


def _probe(run: GRPORun, asker: Asker, policy: Policy) -> list[Rollout]:
    """Answers to the first questions that will be trained on, in the shapes of a training step."""
    config = run.config
    numbers = range(config.prompts)
    prompts = [asker.prompt(run.questions.at(number)) for number in numbers]
    request = asker.request(prompts, sample_seeds(config.seed, numbers, config.samples))
    rollouts = run.rollout(policy, request)
    check_rollouts(rollouts, request, policy.version, run.loaded.config)
    return [one for one in rollouts if one.finish != "aborted" and one.tokens]


def _metrics(run: GRPORun, parameters: Parameters, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Both sides compared as in training, where the trainer's own choice of experts is told even
    if the rollout's is replayed.
    """
    longest = max(len(one.prompt) + run.config.max_tokens for one in rollouts)
    examples = [
        Experience(
            tokens=np.array([*one.prompt, *one.tokens], np.int32),
            logprobs=one.logprobs,
            advantage=0.0,
            weight=0.0,
            choices=one.choices,
            pages=one.pages,
        )
        for one in rollouts
    ]
    packs, _ = pack_experience(examples, run.pack_shape(longest))
    # the update's own program: nothing else has to be compiled, and it is what is to be checked
    gradient, parts = jax.tree.map(jnp.zeros_like, parameters), []
    with run.loaded.on_mesh():
        for pack in packs:
            pack = jax.tree.map(jnp.asarray, pack)
            gradient, sums = accumulate(gradient, run.loaded.model, parameters, pack, run.program)
            parts.append(sums)
    return combined(jax.device_get(parts))


def _shaken(parameters: Parameters, seed: int) -> Parameters:
    """The parameters with a little noise."""
    key = jax.random.key(seed)
    return {
        name: x + SHAKE * jax.random.normal(jax.random.fold_in(key, number), x.shape)
        for number, (name, x) in enumerate(sorted(parameters.items()))
    }
