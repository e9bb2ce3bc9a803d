"""What the engine's thread keeps of a sequence beside what the scheduler does: where its outputs
go, what is held back of them, and when things happened to it.
"""

from collections.abc import Sequence as Items

from serving.engine.grammar_rows import GrammarRow
from serving.engine.stops import StopWatch
from serving.engine.streams import Box, End
from serving.engine.token_run import PromptScores, TokenRun
from serving.engine_api import Logprobs
from serving.scheduling.plan import RowLogprobs
from serving.scheduling.request import FinishReason, Request
from serving.statistics import SequenceRecord

NAN = "the model's logits are not numbers, or no token is allowed, after {} tokens"


class Sequence:
    """One of the n sequences of a request, from its arrival at the scheduler to its end."""

    __slots__ = (
        *("request", "box", "stops", "grammar", "end", "rank", "slot", "name", "blocks"),
        *("is_free", "is_plain"),
        *("arrival", "first_scheduled", "first_token", "last_token"),
        *("_held", "_scores", "_num_told", "_num_tokens"),
    )

    def __init__(
        self,
        request: Request,
        box: Box,
        *,
        arrival: float,
        stops: StopWatch | None = None,
        grammar: GrammarRow | None = None,
    ):
        self.request, self.box, self.arrival = request, box, arrival
        box.request = request
        self.stops, self.grammar = stops, grammar
        self.end: End | None = None
        self.rank = self.slot = -1  # where it ran last
        self.blocks: list[int] = []  # and those it had there, as many as it came to have
        self.name = f"{request.request_id}/{request.index}"
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._held = TokenRun(request.sampling.logprobs)
        self._num_told = self._num_tokens = 0  # told, and that count
        wanted = request.sampling.prompt_logprobs
        self._scores = None if wanted is None else PromptScores(wanted)
        # Whether its tokens alone say what goes on.
        self.is_free = grammar is None and wanted is None
        self.is_plain = self.is_free and stops is None  # its own tokens are what was told

    def enter(self, rank: int, slot: int, now: float) -> None:
        """Notes that it was admitted to a slot."""
        self.rank, self.slot, self.blocks = rank, slot, self.request.blocks
        if self.first_scheduled is None:
            self.first_scheduled = now

    def score_prompt(self, start: int, row: RowLogprobs) -> None:
        """Takes the log-probabilities of a chunk of its prompt."""
        if self._scores is not None:
            self._scores.add(start, row)

    def length_with(self, tokens: list[int]) -> int:
        """Its tokens that count, prompt and answer, with these new ones, before they are told."""
        if self.is_plain:
            return self.request.num_tokens
        return self.request.prompt_length + self._num_tokens + len(tokens)

    def passes(self, tokens: list[int]) -> bool:
        """Whether all new tokens of a step that ends nothing count and may be told at once: nothing
        waits before them or reads them any more. Not asked of a plain sequence, where it is so.
        """
        if not self.is_free:
            return False
        if self.stops is not None and (self._held.ids or not self.stops.skips(tokens)):
            return False
        self._num_tokens += len(tokens)
        self._num_told = self._num_tokens
        return True

    def settle(self, tokens: list[int], drafts: Items[int]) -> int:
        """Says by grammar and stop strings how many of a step's new tokens count, and sets `end` if
        the sequence ends with them. The request has them all by now.
        """
        reason, count = self.request.finish_reason, len(tokens)
        if reason is not None:
            self.end = self._own_end(reason)
        if self.grammar is not None and reason is None:
            count = self._settle_grammar(self.grammar, tokens, drafts)
        if self.stops is not None:
            count = self._settle_stops(self.stops, tokens[:count])
        return count

    def tell(self, tokens: list[int], row: RowLogprobs | None) -> None:
        """Adds new tokens to what its reader will get, with its end if it has one; the handover's
        lock is held. What may be part of a stop string waits.
        """
        self._num_tokens += len(tokens)
        box, scores = self.box, self._take_scores()
        stops, waits = self.stops, bool(self._held.ids)
        if stops is None or (not waits and stops.num_certain == self._num_tokens):
            told = len(tokens)
            box.run.add(tokens, row)
        else:
            self._held.add(tokens, row)
            certain = self._num_tokens if self.end is not None else stops.num_certain
            told = certain - self._num_told
            box.run.add_run(self._held.take(told))
        self._num_told += told
        if scores is not None:
            box.prompt_logprobs = scores
        if self.end is not None:
            box.finish(self.end)
        elif (told or scores is not None) and not box.is_new:
            box.mark()

    def record(self, now: float) -> SequenceRecord:
        """What it was, at its end."""
        request = self.request
        assert self.end is not None
        return SequenceRecord(
            request_id=request.request_id,
            index=request.index,
            reason=self.end.reason,
            n=request.sampling.n,
            max_tokens=request.sampling.max_tokens,
            prompt_tokens=request.prompt_length,
            cached_tokens=request.cached_tokens or 0,
            generation_tokens=request.num_output_tokens if self.is_plain else self._num_tokens,
            preemptions=request.num_preemptions,
            arrival=self.arrival,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            last_token=self.last_token,
            end=now,
        )

    def _take_scores(self) -> Logprobs | None:
        """The log-probabilities of the prompt, once, when they are whole."""
        scores, length = self._scores, self.request.prompt_length
        if scores is None or scores.count < length - 1:
            return None
        self._scores = None
        return scores.of(self.request.tokens[:length].tolist())

    def _own_end(self, reason: FinishReason) -> End:
        request = self.request
        if reason == "error":
            return End("error", error=NAN.format(request.num_tokens))
        stop = request.stop_token if reason == "stop" else None
        own = () if request.sampling.ignore_eos else request.asked.eos_token_ids
        return End(reason, matched_stop=None if stop in own else stop)

    def _settle_grammar(self, grammar: GrammarRow, tokens: list[int], drafts: Items[int]) -> int:
        try:
            end = grammar.advance(tokens, drafts)
        except (ValueError, RuntimeError) as error:
            self.end = End("error", error=str(error))
            return len(tokens)
        if end is None:
            return len(tokens)
        self.end = End("stop")
        return end

    def _settle_stops(self, stops: StopWatch, tokens: list[int]) -> int:
        """A stop token is no text, and a stop string that is complete before it goes first."""
        ends_by_token = self.request.stop_token is not None and self.end is not None
        text = tokens[:-1] if ends_by_token else tokens
        count = stops.read(text)
        if count is None and self.end is not None and self.end.reason != "error":
            stops.end()
        if stops.match is not None:
            self.end = End("stop", matched_stop=stops.match.stop)
        return len(tokens) if count is None else count
