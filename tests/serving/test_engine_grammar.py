"""Grammars through the engine: masks for each place, the thought before, ends and faults."""

import asyncio
import json

import jsonschema
import pytest

from serving.engine_api import EngineError
from serving.grammar.grammars import GrammarLimits
from tests.serving.engines import EOS, collect, grammar, ids, run, running
from tests.serving.grammars import tokenizer
from tests.serving.servers import soon

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MODES = pytest.mark.parametrize(
    "config",
    [{"async_scheduling": False}, {"num_scheduler_steps": 4}, {"num_speculative_tokens": 3}],
    ids=["one", "many steps", "drafts"],
)


def text_of(whole) -> str:
    return tokenizer().decode([token for token in whole.tokens if token != EOS])


@MODES
def test_what_the_grammar_forbids_is_never_written(config):
    async def test():
        async with running(**config) as it:
            streams = [
                it.submit(
                    f"r{i}",
                    5 + i,
                    max_tokens=120,
                    seed=i,
                    structured_outputs=grammar("json", json.dumps(SCHEMA)),
                )
                for i in range(6)
            ]
            plain = it.submit("plain", 5, max_tokens=60)
            *wholes, _ = await asyncio.gather(*map(collect, [*streams, plain]))
            await it.idle()
            ended = [whole for (whole,) in wholes if whole.reason == "stop"]
            assert ended
            for whole in ended:
                jsonschema.validate(json.loads(text_of(whole)), SCHEMA)

    run(test)


@pytest.mark.parametrize("good", [0, 1, 3])
def test_f108_drafts_under_a_grammar_change_nothing(good):
    """Right drafts, drafts that the grammar forbids, and a script that it lets through in part."""

    async def written(**config):
        async with running(good_drafts=good, **config) as it:
            it.script("r", '{"name": "Bobby Brown", "age": 12}')
            output = grammar("json", json.dumps(SCHEMA))
            (whole,) = await it.run("r", 5, max_tokens=100, structured_outputs=output)
            return whole.tokens, it.engine.statistics.accepted_tokens

    plain, _ = run(lambda: written())
    drafted, accepted = run(lambda: written(num_speculative_tokens=3))
    assert plain == drafted
    assert (accepted > 0) == (good > 0)


def test_f108_a_preempted_sequence_goes_on_in_its_grammar():
    async def test():
        async with running(num_blocks=8, num_speculative_tokens=3, good_drafts=3) as it:
            text = '{"name": "Bob", "age": ' + "1234567890" * 3 + "}"
            streams = []
            for i in range(6):
                it.script(f"r{i}", text)
                output = grammar("json", json.dumps(SCHEMA))
                streams.append(it.submit(f"r{i}", 5, max_tokens=100, structured_outputs=output))
            wholes = await asyncio.gather(*map(collect, streams))
            assert {text_of(whole) for (whole,) in wholes} == {text}
            assert it.engine.statistics.preemptions > 0
            await it.idle()

    run(test)


def test_the_grammar_waits_for_the_end_of_the_thought_unless_asked_otherwise():
    async def test():
        async with running() as it:
            it.script("waits", "I think</mm:think>no")
            it.script("binds", "I think</mm:think>no")
            prompt = ids("x<mm:think>")
            for name in ("waits", "binds"):
                output = grammar("choice", '["yes", "no"]', from_first_token=name == "binds")
                (whole,) = await it.run(name, prompt, max_tokens=50, structured_outputs=output)
                expected = "I think</mm:think>no" if name == "waits" else None
                assert expected is None or text_of(whole) == expected
                assert name == "waits" or text_of(whole) in ("yes", "no")

    run(test)


def test_the_engine_can_be_told_not_to_wait_for_thoughts():
    async def test():
        async with running(waits=False) as it:
            it.script("r", "I think</mm:think>no")
            output = grammar("choice", '["yes", "no"]', from_first_token=False)
            (whole,) = await it.run("r", ids("x<mm:think>"), structured_outputs=output)
            assert text_of(whole) in ("yes", "no")

    run(test)


@MODES
@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 30}])
def test_where_a_grammar_ends_nothing_else_may_follow(options, config):
    """Neither `ignore_eos` nor `min_tokens` is applied where only a stop could come."""

    async def test():
        async with running(**config) as it:
            output = grammar("regex", "abc|abd")
            (whole,) = await it.run("r", 5, max_tokens=40, structured_outputs=output, **options)
            assert text_of(whole) in ("abc", "abd") and EOS not in whole.tokens
            assert (whole.reason, whole.end.matched_stop) == ("stop", None)
            await it.idle()

    run(test)


@MODES
@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 40}])
def test_where_the_grammar_goes_on_no_stop_is_taken_too_early(options, config):
    async def test():
        async with running(**config) as it:
            output = grammar("regex", "(ab)*")
            (whole,) = await it.run("r", 5, max_tokens=40, structured_outputs=output, **options)
            assert (len(whole.tokens), EOS in whole.tokens[:-1]) == (40, False)

    run(test)


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("json", "{", "no JSON"),
        ("regex", "(", "regex cannot be compiled"),
        ("grammar", "root ::= other", "other"),
        ("choice", "[]", "choice names no text"),
        ("structural_tag", "[]", "structural_tag"),
    ],
)
def test_a_bad_grammar_is_a_sentence_before_any_output(kind, text, sentence):
    async def test():
        async with running() as it:
            stream = it.submit("r", 5, structured_outputs=grammar(kind, text))
            with pytest.raises(ValueError, match=sentence):
                await anext(stream)
            assert not it.device.plans
            (again,) = await it.run("r", 5)
            assert again.reason == "length"
            await it.idle()

    run(test)


def test_a_grammar_that_outgrows_its_limits_ends_its_request_alone():
    async def test():
        async with running(limits=GrammarLimits(mask_items=100)) as it:
            grown = grammar("grammar", 'root ::= "x" y\ny ::= y y y | [a-z] | ""')
            bad = it.submit("bad", 5, max_tokens=30, structured_outputs=grown)
            good = it.submit("good", 6, max_tokens=30)
            (one,), (other,) = await asyncio.gather(collect(bad), collect(good))
            assert one.reason == "error" and "grammar" in one.end.error
            assert other.reason == "length"
            await it.idle()

    run(test)


def test_a_request_may_be_aborted_while_its_grammar_is_compiled():
    async def test():
        async with running() as it:
            schema = {"enum": [f"{i:05d}" * 4 for i in range(3000)]}
            output = grammar("json", json.dumps(schema))
            streams = [it.submit(f"r{i}", 5, n=2, structured_outputs=output) for i in range(3)]
            for i in range(3):
                it.engine.abort(f"r{i}")
            for stream in streams:
                assert [whole.reason for whole in await collect(stream)] == ["abort", "abort"]
            await soon(lambda: not it.engine._requests._compiling)
            await it.idle()
            assert not it.device.plans

    run(test)


def test_masks_are_one_for_each_place_of_rows_with_a_grammar():
    async def test():
        async with running(num_speculative_tokens=3) as it:
            output = grammar("regex", "[a-z]{20}")
            await asyncio.gather(
                it.run("r", 5, max_tokens=10, structured_outputs=output), it.run("plain", 6)
            )
            words = -(-512 // 32)
            for plan, masks in zip(it.device.plans, it.device.masks, strict=True):
                part = plan.ranks[0]
                widths = dict(zip(part.decode_slots, part.decode_widths, strict=True))
                for (rank, slot), mask in masks.items():
                    assert rank == 0 and mask.shape == (1 + widths.get(slot, 0), words)
            assert any(len(mask) > 1 for masks in it.device.masks for mask in masks.values())

    run(test)


def test_a_compiler_that_fails_is_an_error_of_its_request():
    async def test():
        async with running() as it:
            desk = it.engine._requests._readers.grammars
            assert desk is not None
            desk._grammars.matcher = lambda *given: (_ for _ in ()).throw(RuntimeError("cut short"))
            stream = it.submit("r", 5, structured_outputs=grammar("regex", "a"))
            with pytest.raises(EngineError, match="could not be compiled: cut short"):
                await anext(stream)
            await it.idle()

    run(test)
