"""One sequence's life on the host, from arrival to its finish reason.

A request with n > 1 is n sequences with one prompt; the prompt's blocks are shared through the
prefix cache. Positions are counted three ways: `computed` leading tokens have their keys in pages
for certain, `num_tokens` are known, and with the steps in flight there are between `least` and
`most` tokens.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

from serving.scheduling.block_hashes import BlockHash, extend_chain, root_hash
from serving.scheduling.sampling_params import SamplingParams, child_seed

FinishReason = Literal["stop", "length", "abort", "error"]


class Phase(Enum):
    """Where a request is. A draining one has left the running ones with steps still in flight."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What came in: one prompt and how to go on from it.

    Less urgent requests have a larger `priority`, as in vLLM. `adapter_version` changes when an
    adapter of the same name gets new weights; `cache_salt` keeps tenants' prefixes apart; `rank`
    pins a data rank; `eos_token_ids` are the model's.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    adapter: str | None = None
    adapter_version: int = 0
    cache_salt: str = ""
    rank: int | None = None


class Request:
    """A sequence, its tokens and what it holds. The scheduler alone changes it."""

    __slots__ = (
        *("asked", "index", "sampling", "seed", "order", "salt", "root", "chain"),
        *("tokens", "prompt_length", "least_length", "limit", "eos_or_stop_ids"),
        *("is_synchronous", "takes_single_steps", "phase", "finish_reason", "stop_token"),
        *("weight_version", "rank", "slot", "blocks", "computed", "published"),
        *("prefill_planned", "prefill_target", "least", "most", "steps_in_flight", "bypassed"),
        "has_drafts",
        *("cached_tokens", "num_preemptions", "draft_tokens", "accepted_tokens", "owner"),
    )

    def __init__(
        self,
        asked: Asked,
        index: int,
        *,
        seed: int,
        arrival: int,
        max_model_len: int,
        salt: str = "",
        weight_version: int = 0,
    ):
        """Sequence `index` of what was asked. `seed` is the one to draw with, asked for or not;
        sequences with another `salt` share no blocks with it.
        """
        self.asked, self.index, self.sampling = asked, index, asked.sampling
        self.salt = salt
        self.seed = child_seed(seed, index)
        self.order = (asked.priority, arrival)  # lower goes first
        self.tokens = array("i", asked.prompt)
        self.prompt_length = len(self.tokens)
        most = self.sampling.max_tokens
        longest = self.prompt_length + (max_model_len if most is None else most)
        self.limit = min(longest, max_model_len)  # the first position that is not generated
        self.least_length = self.prompt_length + self.sampling.min_tokens  # before a stop counts
        eos = () if self.sampling.ignore_eos else asked.eos_token_ids
        self.eos_or_stop_ids = frozenset(eos) | frozenset(self.sampling.stop_token_ids)
        # A grammar's mask needs every token before it, so no step is planned ahead; and where the
        # host looks for the end in the text, a dispatch of several steps would often be in vain.
        self.is_synchronous = self.sampling.structured_outputs is not None
        self.takes_single_steps = self.is_synchronous or bool(self.sampling.stop)
        self.phase = Phase.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.weight_version = self.bypassed = self.num_preemptions = 0
        self.cached_tokens: int | None = None  # of the first admission
        self.draft_tokens = self.accepted_tokens = 0
        self.owner: Any = None  # of whoever asked, to find it by; nothing here reads it
        self.chain: list[BlockHash] = []
        self.root = b""
        self.leave_pages()
        self.set_weight_version(weight_version)

    @property
    def request_id(self) -> str:
        """The id under which it was asked for, which all sequences of a request share."""
        return self.asked.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Known tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of its known tokens is not planned yet."""
        return self.prefill_planned < self.prefill_target

    @property
    def yields_nothing(self) -> bool:
        """Whether only its prompt is scored."""
        return self.sampling.max_tokens == 0

    def set_weight_version(self, weight_version: int) -> None:
        """Names its blocks' contents anew, as those of a weight version."""
        asked = self.asked
        root = root_hash(
            weight_version=weight_version,
            adapter=asked.adapter,
            adapter_version=asked.adapter_version,
            salt=self.salt,
        )
        if root != self.root:
            self.chain, self.root = [], root
        self.weight_version = weight_version

    def hashes(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """The hashes of at least its first `num_blocks` blocks, each made once."""
        if len(self.chain) < num_blocks:
            extend_chain(self.chain, self.root, self.tokens, block_size, num_blocks)
        return self.chain

    def enter_pages(
        self, rank: int, slot: int, blocks: list[int], *, num_found: int, computed: int
    ) -> None:
        """Begins to run on a rank, with `computed` tokens in the `num_found` first blocks.

        `blocks` are its own to lengthen, and hold all known tokens and the next one.
        """
        self.phase, self.rank, self.slot, self.blocks = Phase.RUNNING, rank, slot, blocks
        self.published, self.bypassed = num_found, 0
        self.computed = self.prefill_planned = computed
        self.prefill_target = self.num_tokens
        self.least = self.most = self.num_tokens
        if self.cached_tokens is None:
            self.cached_tokens = computed

    def leave_pages(self) -> None:
        """Forgets what it held; its tokens stay, to be computed again."""
        self.rank = self.slot = -1
        self.blocks: list[int] = []
        self.computed = self.published = self.prefill_planned = self.prefill_target = 0
        self.steps_in_flight = 0
        self.has_drafts = False  # when the last step that is planned has ended
        self.least = self.most = self.num_tokens

    def take(self, new_tokens: list[int]) -> list[int]:
        """Adds the tokens of a step up to the one that ends the sequence; what was added.

        A stop is tested before the length, so a stop at the last place is "stop".
        """
        tokens, stops, length = self.tokens, self.eos_or_stop_ids, len(self.tokens)
        if length + len(new_tokens) < self.limit:  # the usual cases, fast
            if len(new_tokens) == 1:
                if new_tokens[0] not in stops:
                    tokens.append(new_tokens[0])
                    return new_tokens
            elif stops.isdisjoint(new_tokens):
                tokens.extend(new_tokens)
                return new_tokens
        for place, token in enumerate(new_tokens, start=1):
            tokens.append(token)
            length += 1
            if token in stops and length >= self.least_length:
                self.finish_reason, self.stop_token = "stop", token
                return new_tokens[:place]
            if length >= self.limit:
                self.finish_reason = "length"
                return new_tokens[:place]
        return new_tokens


def whole_prompt(asked: Asked, max_model_len: int) -> Asked:
    """What was asked with its prompt cut from the left as `truncate_prompt_tokens` says.

    Raises ValueError when there is no prompt, or no room for a token after it.
    """
    asked = replace(asked, prompt=_truncated(asked, max_model_len))
    if not asked.prompt:
        raise ValueError(f"request {asked.request_id!r} has an empty prompt")
    room = 0 if asked.sampling.max_tokens == 0 else 1
    if len(asked.prompt) + room > max_model_len:
        raise ValueError(
            f"the prompt has {len(asked.prompt)} tokens, but with max_model_len={max_model_len} "
            f"at most {max_model_len - room} leave room for {room} more"
        )
    return asked


def _truncated(asked: Asked, max_model_len: int) -> Sequence[int]:
    most = asked.sampling.truncate_prompt_tokens
    if most is None:
        return asked.prompt
    most = max_model_len - 1 if most == -1 else most
    return asked.prompt[-most:]
