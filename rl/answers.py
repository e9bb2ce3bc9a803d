"""A rollout's ids as what a reward is given: the text after the thought, and the thought."""

from minimax_jax.chat import Prompt, Tokenizer
from minimax_jax.completion import Collector, TokenLogprob
from rl.rewards import Answer
from rl.rollouts import Rollout


def answer_of(rollout: Rollout, prompt: Prompt, tokenizer: Tokenizer) -> Answer:
    """Read as `generate` reads its answers, so that training and evaluation agree."""
    collector = Collector(
        prompt, tokenizer, max_tokens=len(rollout.tokens) + 1, stop_ids=tokenizer.stop_ids
    )
    for token, logprob in zip(rollout.tokens, rollout.logprobs.tolist(), strict=True):
        collector.push(TokenLogprob(token_id=token, logprob=logprob))
    if collector.finish_reason is None:
        collector.finish("length")
    completion = collector.completion(0.0, logprobs=False)
    return Answer(
        text=completion.text or "",
        thought=completion.reasoning,
        num_tokens=len(rollout.tokens),
        finished=rollout.finish == "stop",
    )
