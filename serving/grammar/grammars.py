"""Compiles what requests ask for, within limits, and keeps the latest grammars.

A request's text is compiled once while it is in use; each sequence gets a matcher of its own.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import llguidance

from minimax_jax.chat.dialects import M3, Dialect
from serving.grammar.matcher import GrammarMatcher
from serving.grammar.source import Thought, grammar_source
from serving.grammar.vocabulary import GrammarVocabulary
from serving.scheduling.sampling_params import StructuredOutput

_Key = tuple[StructuredOutput, Thought]


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """What one grammar may cost. Work is counted, not timed, so that a busy machine refuses nothing
    that an idle one takes: llguidance does about 50,000 units of compiling a millisecond, and
    20,000 items of a mask.
    """

    max_characters: int = 256 * 1024
    max_symbols: int = 200_000
    compile_work: int = 10_000_000
    lexer_states: int = 100_000
    mask_items: int = 500_000
    num_cached: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} is not at least 1")

    def of_parser(self) -> llguidance.LLParserLimits:
        """The same in llguidance's words. Its errors are kept short, for they go to clients."""
        return llguidance.LLParserLimits(
            max_grammar_size=self.max_symbols,
            initial_lexer_fuel=self.compile_work,
            step_lexer_fuel=self.compile_work,
            max_lexer_states=self.lexer_states,
            step_max_items=self.mask_items,
            verbose_errors=False,
        )


class Grammars:
    """The compiled grammars of a model; threads may share it."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        limits: GrammarLimits | None = None,
        dialect: Dialect = M3,
    ):
        self._vocabulary = vocabulary
        self._limits = limits or GrammarLimits()
        self._dialect = dialect
        self._lock = threading.Lock()
        self._compiled: OrderedDict[_Key, Future[llguidance.LLMatcher]] = OrderedDict()
        self.num_compiled = 0  # since the start, for the metrics

    def __len__(self) -> int:
        return len(self._compiled)

    def matcher(
        self, output: StructuredOutput, thought: Thought, stop_ids: Sequence[int]
    ) -> GrammarMatcher:
        """A matcher at the start of what is asked for, in a reply that begins as `thought` says.

        Compiles, or waits for the thread that does. ValueError with a sentence for what is no
        grammar, cannot be translated or is beyond the limits.
        """
        state = self._state(output, thought).deep_copy()
        return GrammarMatcher(state, self._vocabulary, stop_ids)

    def _state(self, output: StructuredOutput, thought: Thought) -> llguidance.LLMatcher:
        key = (output, Thought.OVER if output.from_first_token else thought)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
            else:
                mine = self._compiled[key] = Future()
                self.num_compiled += 1
                while len(self._compiled) > self._limits.num_cached:
                    self._compiled.popitem(last=False)
        return found.result() if found is not None else self._compile(key, mine)

    def _compile(self, key: _Key, mine: Future[llguidance.LLMatcher]) -> llguidance.LLMatcher:
        try:
            mine.set_result(self._compile_now(*key))
        except ValueError as error:
            mine.set_exception(error)
        finally:
            if not mine.done():  # whoever waits must not wait for ever
                mine.set_exception(RuntimeError(f"compiling the {key[0].kind} was cut short"))
            if mine.exception() is not None:
                self._forget(key, mine)
        return mine.result()

    def _forget(self, key: _Key, mine: Future[llguidance.LLMatcher]) -> None:
        with self._lock:
            if self._compiled.get(key) is mine:
                del self._compiled[key]

    def _compile_now(self, output: StructuredOutput, thought: Thought) -> llguidance.LLMatcher:
        if len(output.text) > self._limits.max_characters:
            raise ValueError(
                f"{output.kind} has {len(output.text)} characters, at most "
                f"{self._limits.max_characters} are compiled"
            )
        try:
            source = grammar_source(output, thought, self._vocabulary, self._dialect)
        except RecursionError as error:
            raise ValueError(f"{output.kind} is nested too deeply") from error
        limits = self._limits.of_parser()
        state = llguidance.LLMatcher(self._vocabulary.engine, source, log_level=0, limits=limits)
        if not state.is_error():
            state.compute_bitmask()  # the first mask costs most, and shows what is too large
        if state.is_error():
            reason = " ".join(state.get_error().split())
            raise ValueError(f"{output.kind} cannot be compiled: {reason[:300]}")
        return state
