"""The flags of how tokens are sampled, and the keywords of `generate` that they become."""

import argparse
from typing import Any

from minimax_jax.generate import Options


def add_sampling_flags(parser: argparse.ArgumentParser) -> Any:
    """Adds the group, and returns it."""
    how = parser.add_argument_group("sampling")
    how.add_argument("--max-tokens", type=int, default=256)
    how.add_argument("--min-tokens", type=int, default=0, help="no end before that many")
    how.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--top-k", type=int, default=0, help="0: off")
    how.add_argument("--min-p", type=float, default=0.0)
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--repetition-penalty", type=float, default=1.0, help="1: off")
    how.add_argument("--presence-penalty", type=float, default=0.0)
    how.add_argument("--frequency-penalty", type=float, default=0.0)
    repeatable = {"action": "append", "default": []}
    how.add_argument(
        "--logit-bias",
        type=_bias,
        **repeatable,
        metavar="ID=BIAS",
        help="as in 52=-100 (repeatable)",
    )
    how.add_argument("--allowed-token-ids", type=_ids, metavar="IDS", help="as in 1,2,3")
    how.add_argument("--stop-token-ids", type=_ids, default=(), metavar="IDS", help="as in 1,2,3")
    how.add_argument("--stop", **repeatable, help="a stop string (repeatable)")
    how.add_argument("--bad-word", **repeatable, help="a text never completed (repeatable)")
    return how


def sampling_options(options: argparse.Namespace) -> Options:
    """What the flags say."""
    return Options(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=dict(options.logit_bias),
        allowed_token_ids=options.allowed_token_ids,
        stop_token_ids=options.stop_token_ids,
        stop=options.stop,
        bad_words=options.bad_word,
    )


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ids as in 1,2,3") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an id and a bias as in 5=-1.5") from None
