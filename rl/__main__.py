"""The command `minimax-train`: `sft` trains a small model from scratch, `grpo` one by reinforcement
and `plot` draws its curves, `drafter` trains a drafter to a model and `calibrate` fits its
confidences, `eval` measures a model, `bench` the speed of training, `tokenizer` makes a tokenizer.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

import serving
from configs.cli import add_flags, from_flags, read_config
from configs.drafter_training import DrafterTrainingConfig
from configs.model import ModelConfig
from configs.parts import DrafterConfig
from configs.presets import DRAFTERS, PRESETS
from configs.rl import GRPO_PRESETS, GRPOConfig
from configs.sft import SFTConfig
from minimax_jax.compiled import keep_compiled_programs
from minimax_jax.loaded import ASSETS, load
from minimax_jax.lora import Adapter
from rl.bench.command import add_bench
from rl.calibrate import add_calibrate
from rl.curves import plot_runs
from rl.engine_rollout import EngineRollout, Sampled
from rl.eval_command import add_eval
from rl.grpo import train_grpo
from rl.grpo_run import GRPORun
from rl.grpo_run import start_run as start_grpo
from rl.peft_files import write_adapter
from rl.policy import initial_parameters
from rl.rollouts import RolloutRequest
from rl.sft import train
from rl.sft_run import start_run
from rl.sft_step import DTYPES
from rl.tokenizer import train_tokenizer
from rl.train_drafter import DrafterRun, train_drafter

TEXT = ASSETS / "tiny"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one subcommand; bad input is one sentence on stderr and exit code 2."""
    options = _parser().parse_args(arguments)
    keep_compiled_programs()
    try:
        options.run(options, Console())
    except (ValueError, OSError) as error:
        print(f"minimax-train: {error}", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minimax-train", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    sft = commands.add_parser(
        "sft", allow_abbrev=False, help="train from scratch on generated problems"
    )
    sft.set_defaults(run=_sft)
    sft.add_argument("--config", default="tiny", help="a preset's name or a TOML file")
    sft.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes of the model's config"
    )
    sft.add_argument("--out", type=Path, required=True, help="the run's folder")
    sft.add_argument(
        "--text", type=Path, default=TEXT, help="folder of tokenizer and chat template"
    )
    sft.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out"
    )
    add_flags(sft, SFTConfig)
    _add_grpo(commands)
    drafter = commands.add_parser(
        "drafter", allow_abbrev=False, help="train a DSpark drafter on a model's own answers"
    )
    drafter.set_defaults(run=_drafter)
    drafter.add_argument("--target", default="tiny", help="a bundled name, a folder or a hub name")
    drafter.add_argument(
        "--config", default="tiny", help=f"the drafter: {', '.join(DRAFTERS)} or a TOML file"
    )
    drafter.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes of the drafter's config"
    )
    drafter.add_argument("--out", type=Path, required=True, help="the run's folder")
    drafter.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out"
    )
    add_flags(drafter, DrafterTrainingConfig)
    add_eval(
        commands.add_parser("eval", allow_abbrev=False, help="exact match on held-out problems")
    )
    add_calibrate(
        commands.add_parser(
            "calibrate",
            allow_abbrev=False,
            help="fit a drafter's confidences to what became of them",
        )
    )
    add_bench(
        commands.add_parser("bench", allow_abbrev=False, help="tokens/s of rollout and update")
    )
    tokenizer = commands.add_parser(
        "tokenizer", allow_abbrev=False, help="train the small tokenizer"
    )
    tokenizer.set_defaults(run=_tokenizer)
    tokenizer.add_argument(
        "folder", type=Path, help="holds chat_template.jinja; the files are written here"
    )
    return parser


def _add_grpo(commands: Any) -> None:
    """`grpo` and `plot`."""
    grpo = commands.add_parser("grpo", allow_abbrev=False, help="reinforcement by GRPO")
    grpo.set_defaults(run=_grpo)
    presets = ", ".join(GRPO_PRESETS)
    grpo.add_argument("--config", default="tiny_arith", help=f"{presets}, or a TOML file")
    grpo.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes of the config (configs/rl.py)"
    )
    grpo.add_argument("--out", type=Path, required=True, help="the run's folder")
    grpo.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out"
    )
    plot = commands.add_parser("plot", allow_abbrev=False, help="the curves of GRPO runs")
    plot.set_defaults(run=_plot)
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    plot.add_argument(
        "--out", type=Path, help="the picture; by default curves.png in the first folder"
    )


def _grpo(options: argparse.Namespace, console: Console) -> None:
    config = read_config(GRPOConfig, GRPO_PRESETS, options.config, options.overrides)
    run = start_grpo(config, options.out)
    if config.rollout == "local":
        train_grpo(run, console, resume=options.resume)
        return
    with ServedPolicy(policy_server(run)) as engine:
        served = replace(run, rollout=EngineRollout(engine))
        train_grpo(served, console, resume=options.resume)


POLICY = "policy"  # the adapter's name in the engine


def policy_server(run: GRPORun) -> Any:
    """An engine in this process with a run's model and room for its adapter."""
    config, model = run.config, run.loaded.config
    with TemporaryDirectory() as folder:
        # how large an adapter is, an engine knows by one; its values come with each policy
        how = {"rank": config.rank, "alpha": config.alpha, "folder": Path(folder)}
        write_adapter(initial_parameters(run.loaded, config), model, config.model, **how)
        return serving.LLM(
            config.model,
            lora=f"{POLICY}={folder}",
            dtype={"f32": "float32", "bf16": "bfloat16"}[config.dtype],
            max_num_seqs=config.wave,
            enable_return_routed_experts=config.replay,
        )


class ServedPolicy:
    """`rl.engine_rollout.Engine` over a `serving.LLM`, which it ends; use as a context manager."""

    def __init__(self, llm: Any):
        self._llm = llm

    def __enter__(self) -> "ServedPolicy":
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def publish(self, adapter: Adapter) -> None:
        self._llm.update(adapters={POLICY: adapter})

    def answers(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], request: RolloutRequest
    ) -> list[Sampled]:
        how = {"max_tokens": request.max_tokens, "stop_token_ids": request.stop_ids, "logprobs": 0}
        params = [serving.SamplingParams(seed=seed, **how) for seed in seeds]
        outputs = self._llm.generate(prompts, params, adapter=POLICY, use_tqdm=False)
        return [_sampled(output.outputs[0]) for output in outputs]


def _sampled(found: Any) -> Sampled:
    tokens, entries = found.token_ids, found.logprobs or []
    logprobs = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]
    whole = found.finish_reason in ("stop", "length")
    return Sampled(
        tokens=tokens,
        logprobs=logprobs,
        finish=found.finish_reason if whole else "aborted",
        choices=found.routed_experts,
    )


def _plot(options: argparse.Namespace, console: Console) -> None:
    picture = options.out or options.runs[0] / "curves.png"
    plot_runs(options.runs, picture)
    console.print(f"{picture}", highlight=False)


def _sft(options: argparse.Namespace, console: Console) -> None:
    model = read_config(ModelConfig, PRESETS, options.config, options.overrides)
    run = start_run(model, from_flags(SFTConfig, options), options.text, options.out)
    train(run, console, resume=options.resume)


def _drafter(options: argparse.Namespace, console: Console) -> None:
    drafter = read_config(DrafterConfig, DRAFTERS, options.config, options.overrides)
    config = from_flags(DrafterTrainingConfig, options)
    loaded = load(options.target, dtype=DTYPES[config.dtype])
    run = DrafterRun(loaded=loaded, drafter=drafter, config=config, out=options.out)
    train_drafter(run, console, resume=options.resume)


def _tokenizer(options: argparse.Namespace, console: Console) -> None:
    tokenizer = train_tokenizer(options.folder)
    console.print(f"{options.folder}: {tokenizer.get_vocab_size()} tokens", highlight=False)


if __name__ == "__main__":
    main()
