"""GRPO: questions asked, answers drawn and rewarded, one update a batch, until the last step.

A run's folder holds `train.jsonl` and `loss.png`, `checkpoints/` to resume from, `rollouts/` with
answers to read, and, when a session ends, what `rl.grpo_export` writes.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from rl.batches import Asker, Batch
from rl.dumps import dump_groups
from rl.experience import pack_experience
from rl.grading import Grader
from rl.grpo_eval import evaluated
from rl.grpo_export import export_trained
from rl.grpo_metrics import batch_metrics, combined
from rl.grpo_run import GRPORun
from rl.grpo_step import accumulate, apply
from rl.learnable import learnable
from rl.live import LiveTable
from rl.offload import Moments, peak_memory
from rl.optimizer import Metrics, Parameters, TrainState
from rl.policy import Policy, initial_parameters, published
from rl.run_checkpoints import RunCheckpoints
from rl.run_log import Panel
from rl.self_checks import checks_table, self_checks
from rl.session import Session, open_checkpoints
from rl.sinks import Sink, numbers_of, open_sinks

KL, REWARD = "rollout_corr/k3_kl", "critic/rewards/mean"


def train_grpo(run: GRPORun, console: Console, *, resume: bool) -> None:
    """Checks, measures, then trains until the last step or the time limit, and writes everything.

    Raises ValueError before anything is written when the folder holds another run, or none to
    resume, and before training when a check fails.
    """
    run.check_data()
    state = new_state(run)
    with (
        open_checkpoints(run, resume=resume) as checkpoints,
        Grader(run.reward, run.config.reward_workers, run.config.reward_seconds) as grader,
    ):
        asker = run.asker(grader)
        GRPOTrainer(run, console, checkpoints, asker, state, resume=resume).train()


def new_state(run: GRPORun) -> TrainState:
    """The state before the first step."""
    return TrainState.new(initial_parameters(run.loaded, run.config), run.program.optimizer)


class GRPOTrainer(Session):
    """One session of a GRPO run."""

    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(names=(REWARD, "reward/acc"), ylabel="reward"),
        Panel(names=(KL, "rollout_corr/logprob_abs_diff"), ylabel="nats a token", log=True),
        Panel(names=("actor/entropy", "actor/grad_norm"), ylabel="nats a token; norm"),
    )

    def __init__(
        self,
        run: GRPORun,
        console: Console,
        checkpoints: RunCheckpoints,
        asker: Asker,
        state: TrainState,
        *,
        resume: bool,
    ):
        super().__init__(run, console, checkpoints, state, resume=resume)
        self.program, self.console, self.asker = run.program, console, asker
        self.position = self.noted.get("position", 0)  # in the questions
        self.reporter = LiveTable(console, run.config.steps, self.step)
        self.moments = Moments(run.config.optimizer_offload, run.out)
        self.state = self.moments.away(self.state)
        self.sinks: list[Sink] = []

    def placed(self, state: TrainState) -> TrainState:
        """The state on the run's mesh."""
        return self.run.places.placed(state, self.run.loaded.mesh)

    def train(self) -> None:
        """The checks and, before step 1, an evaluation; then the session."""
        checks = self_checks(self.run, self.asker, self.state.parameters)
        self.console.print(checks_table(checks))
        failed = [check for check in checks if not check.holds]
        if failed:
            worst = failed[0]
            raise ValueError(f"{worst.name}: {worst.found}, but wanted is {worst.wanted}")
        with open_sinks(self.run.config, self.run.out) as self.sinks:
            if not self.step:
                self.evaluate()
            super().train()
        memory = ", ".join(f"{name} {value:.2f}" for name, value in peak_memory().items())
        self.reporter.say(f"peak memory: {memory}")

    def note(self, record: Mapping[str, Any]) -> None:
        """Adds a record to the log, and to what else the config names."""
        super().note(record)
        for sink in self.sinks:
            sink.write(record["step"], numbers_of(record))

    def updates(self) -> Iterator[Metrics]:
        """One update on each batch."""
        while self.step < self.run.config.steps:
            started = time.perf_counter()
            batch = self.asker.batch(self.policy(), self.position)
            examples, advantages = learnable(batch.groups, self.run.config)
            metrics = batch_metrics(batch, advantages)
            updating = time.perf_counter()
            found, norm = self._update(examples)
            self.position = batch.position
            self._tell(batch, advantages)
            now = time.perf_counter()
            seconds = {**batch.seconds, "update_actor": now - updating, "step": now - started}
            times = {f"timing_s/{name}": value for name, value in seconds.items()}
            tokens = float(metrics["perf/total_num_tokens"])
            metrics |= {**found, **times, "actor/grad_norm": norm, "tokens": tokens}
            sampled = metrics["response_length/mean"] * metrics["critic/answers"]
            metrics["perf/rollout_tokens_per_s"] = sampled / seconds["gen"]
            metrics["perf/train_tokens_per_s"] = tokens / seconds["update_actor"]
            metrics |= peak_memory()
            yield {name: jnp.asarray(value) for name, value in metrics.items()}

    def _update(self, examples: list) -> tuple[dict[str, float], float]:
        """One update; its metrics, and the gradient's norm."""
        base, parameters = self.run.loaded.model, self.state.parameters
        longest = max(len(one.tokens) for one in examples)
        packs, _ = pack_experience(examples, self.run.pack_shape(longest))
        gradient: Parameters = {name: jnp.zeros_like(x) for name, x in parameters.items()}
        parts = []
        with self.run.loaded.on_mesh():
            for pack in packs:
                pack = jax.tree.map(jnp.asarray, pack)
                gradient, sums = accumulate(gradient, base, parameters, pack, self.program)
                parts.append(sums)
            state, norm = apply(self.moments.back(self.state), gradient, self.program)
            self.state = self.moments.away(state)
        if not np.isfinite(norm):
            raise ValueError(f"the gradient of step {self.step} has the norm {norm}")
        return combined(jax.device_get(parts)), float(norm)

    def policy(self) -> Policy:
        """What answers the next batch."""
        run = self.run
        model, adapter = published(run.loaded.model, self.state.parameters, run.config)
        return Policy(model=model, adapter=adapter, version=self.step)

    def summary(self, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Means over the steps."""
        named = {name: float(values.mean()) for name, values in columns.items()}
        return {**named, "training/global_step": self.step}

    def line(self, record: Mapping[str, Any]) -> str:
        """Reward, accuracy and mismatch."""
        return (
            f"reward {record[REWARD]:+.3f}  acc {record['reward/acc']:.3f}  kl {record[KL]:.1e}  "
            f"length {record['response_length/mean']:.1f}  {record['timing_s/step']:.1f} s"
        )

    def evaluate(self) -> str | None:
        """Accuracy on held-out questions; never ends a run."""
        record = {"step": self.step, **evaluated(self.asker, self.policy(), self.run.measured)}
        self.note(record)
        means = {name: value for name, value in record.items() if "/mean@" in name}
        found = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        self.reporter.say(f"step {self.step}: {found}")

    def export(self, summary: Mapping[str, Any]) -> None:
        """Writes what was trained."""
        export_trained(self.run, self.state.parameters, summary)

    def _tell(self, batch: Batch, advantages: np.ndarray) -> None:
        """Faults on the terminal, and every `dump_every` steps the answers in a file."""
        for kind, count in batch.faults.items():
            example = batch.examples.get(kind, "")
            self.reporter.say(
                f"step {self.step}: {count} answers without a reward, {kind} {example}"
            )
        every = self.run.config.dump_every
        if every and self.step % every == 0:
            path = self.run.out / "rollouts" / f"step_{self.step:06d}.jsonl"
            dump_groups(path, batch.groups, advantages, self.run.loaded.tokenizer)

    def _note(self) -> dict[str, Any]:
        return {**super()._note(), "position": self.position}
