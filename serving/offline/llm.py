"""Generation without a server, as vLLM's users know it.

with LLM("tiny") as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)
"""

import asyncio
import logging
import weakref
from collections.abc import Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import Progress

from minimax_jax.chat import Chat, ChatFormat, ChatTemplate, Tokenizer
from minimax_jax.compiled import keep_compiled_programs
from serving.assembly import Assembly
from serving.command.flags import parse
from serving.command.loading import load_and_assemble
from serving.command.progress import StartProgress
from serving.command.resolve import Machine, resolve
from serving.engine import BatchingEngine
from serving.engine.weight_update import Mode
from serving.engine_api import Output
from serving.offline.loop_thread import LoopThread
from serving.offline.outputs import RequestOutput, completion, prompt_logprobs
from serving.offline.prompts import Prompt, PromptLike, check_ids, flags_of, read_prompts
from serving.scheduling.request import Asked
from serving.scheduling.sampling_params import SamplingParams

LOG = logging.getLogger(__name__)
Chatted = Sequence[Mapping[str, Any]]  # the messages of a conversation
MAX_OPEN = 1024  # requests that are queued at a time, at most what may wait


class LLM:
    """A model and its engine in this process. Methods may be called from any thread."""

    def __init__(self, model: str, **options: Any):
        """Loads the model and compiles its programs. Options are the flags of `minimax-serve`, as
        keywords: `max_model_len=2048`, `tensor_parallel_size=2`, `speculative_config={...}`.

        Raises ValueError with a sentence for what is unknown or cannot be.
        """
        keep_compiled_programs()
        asked = parse([model, *flags_of(options), "--no-http"])
        machine = Machine(platform=jax.default_backend(), num_devices=jax.device_count())
        resolved = resolve(asked, machine)
        with StartProgress(Console(stderr=True), lambda text: None) as progress:
            loaded, assembly = load_and_assemble(resolved, progress)
        if records := assembly.device.record_bytes:
            LOG.info("records of experts take %.1f MB of the host's memory", records / 1e6)
        self._serve(assembly.engine, loaded.tokenizer, loaded.template, assembly)

    @classmethod
    def over(
        cls,
        engine: BatchingEngine,
        *,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
    ) -> "LLM":
        """The same over an engine that is there already, which `close` ends."""
        self = cls.__new__(cls)
        self._serve(engine, tokenizer, template, None)
        return self

    def _serve(
        self,
        engine: BatchingEngine,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        assembly: Assembly | None,
    ) -> None:
        self._engine, self._tokenizer, self._template = engine, tokenizer, template
        self._loop, self._names = LoopThread("offline"), count()
        self._close = weakref.finalize(self, _end, self._loop, engine, assembly)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine and its threads, and frees the device; once."""
        self._close()

    @property
    def engine(self) -> BatchingEngine:
        """The engine, with its statistics."""
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. ValueError where the model has none."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer: give prompts as token ids")
        return self._tokenizer

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The continuations of each prompt, in their order: a text, token ids, or a mapping with
        `prompt` or `prompt_token_ids` and perhaps a `cache_salt`; one or several.

        Sampling options are one for all or one for each, by default the model's own. With
        `use_tqdm` a terminal shows how many are done. Raises ValueError for what cannot be asked,
        before anything runs, and EngineError when the engine fails.
        """
        read = read_prompts(prompts, self._tokenizer)
        options = [{"adapter": adapter, "priority": one} for one in priority or [0] * len(read)]
        return self._run(read, sampling_params, options, use_tqdm)

    def chat(
        self,
        messages: Chatted | Sequence[Chatted],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The answers to one conversation or several; the text is as the model wrote it, thought
        included.
        """
        if self._template is None:
            raise ValueError("this model has no chat template: use generate")
        chats = ChatFormat(template=self._template, tokenizer=self.get_tokenizer())
        alone = len(messages) > 0 and isinstance(messages[0], Mapping)
        many: list[Any] = [messages] if alone else list(messages)
        options = chat_template_kwargs or {}
        asked = [Chat(messages=tuple(one), tools=tools, options=options) for one in many]
        read = [Prompt(text=one.text, ids=one.ids) for one in map(chats.prompt, asked)]
        return self._run(read, sampling_params, [{"adapter": adapter}] * len(read), use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Drops the prefix cache. EngineBusyError while requests run."""
        self._loop.run(self._engine.flush(0.0))

    def update(
        self, *, params: Any = None, adapters: Mapping[str, Any] | None = None, mode: Mode = "drain"
    ) -> int:
        """Other weights or adapters; the new weight version (`BatchingEngine.update`)."""
        return self._loop.run(self._engine.update(params=params, adapters=adapters, mode=mode))

    def _run(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: Sequence[Mapping[str, Any]],
        shows: bool,
    ) -> list[RequestOutput]:
        """Checks all that is asked, then runs it."""
        if sampling is None:
            sampling = SamplingParams(**self._engine.info.default_sampling)  # type: ignore[arg-type]
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        for name, given in (("sampling_params", each), ("priority", options)):
            if len(given) != len(prompts):
                raise ValueError(f"{len(given)} {name} do not go with {len(prompts)} prompts")
        asked = [
            Asked(
                request_id=f"llm-{next(self._names)}",
                prompt=prompt.ids,
                sampling=params,
                eos_token_ids=self._engine.info.eos_token_ids,
                cache_salt=prompt.salt,
                **own,
            )
            for prompt, params, own in zip(prompts, each, options, strict=True)
        ]
        for one in asked:
            one.sampling.check_vocabulary(self._engine.info.vocab_size)
            check_ids(one.prompt, self._engine.info.vocab_size)
            self._engine.check(one)
        outputs = self._loop.run(self._all(asked, shows))
        return [self._output(*three) for three in zip(prompts, asked, outputs, strict=True)]

    async def _all(self, asked: Sequence[Asked], shows: bool) -> list[list[Output]]:
        """The outputs of all requests, so many at a time that the engine takes them."""
        most = max((one.sampling.n for one in asked), default=1)
        slots = asyncio.Semaphore(max(1, min(MAX_OPEN, self._engine.max_waiting // most)))
        console = Console(stderr=True)
        with Progress(console=console, disable=not (shows and console.is_terminal)) as bar:
            task = bar.add_task("generating", total=len(asked))
            tasks = [asyncio.ensure_future(self._one(one, slots)) for one in asked]
            for one in tasks:
                one.add_done_callback(lambda _: bar.advance(task))
            try:
                return await asyncio.gather(*tasks)
            finally:
                for one in tasks:
                    one.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, asked: Asked, slots: asyncio.Semaphore) -> list[Output]:
        async with slots:
            stream, outputs = self._engine.submit(asked), []
            try:
                async for output in stream:
                    outputs.append(output)
            finally:
                self._engine.abort(asked.request_id)  # nothing, where it has ended
            return outputs

    def _output(self, prompt: Prompt, asked: Asked, outputs: list[Output]) -> RequestOutput:
        sequences: list[list[Output]] = [[] for _ in range(asked.sampling.n)]
        for output in outputs:
            sequences[output.index].append(output)
        return RequestOutput(
            request_id=asked.request_id,
            prompt=prompt.text,
            prompt_token_ids=list(prompt.ids),
            outputs=[completion(own, asked.sampling, self._tokenizer) for own in sequences],
            prompt_logprobs=prompt_logprobs(sequences[0], self._tokenizer),
            num_cached_tokens=sequences[0][-1].cached_tokens,
        )


def _end(loop: LoopThread, engine: BatchingEngine, assembly: Assembly | None) -> None:
    loop.run(engine.close() if assembly is None else assembly.close())
    loop.close()
