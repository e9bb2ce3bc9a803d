"""Schemas, expressions, choices and grammars, held to other judges of the same languages."""

import itertools
import json
import re
import threading

import jsonschema
import numpy as np
import pytest

from serving.grammar.grammars import GrammarLimits, Grammars
from serving.grammar.matcher import GrammarMatcher
from serving.grammar.source import Thought
from serving.scheduling.sampling_params import StructuredOutput
from tests.serving.grammars import (
    accepts,
    allowed,
    draw,
    matcher,
    outgrowing,
    plain_ids,
    tokenizer,
    vocabulary,
)

SCHEMAS = [
    {"type": "object"},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 9},
            "count": {"type": "integer", "minimum": -3, "maximum": 12},
            "kind": {"enum": ["a", "b", None, 3]},
        },
        "required": ["name", "count"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"const": "x"}]}, "minItems": 2},
    {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$"},
    {"type": "string", "format": "date"},
]


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_whatever_is_drawn_satisfies_its_schema(index):
    schema, rng = SCHEMAS[index], np.random.default_rng(index)
    replies = [draw(matcher("json", json.dumps(schema)), rng) for _ in range(20)]
    whole = [reply for reply in replies if reply is not None]
    assert len(whole) >= 12
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for reply in whole:
        checker.validate(json.loads(reply))


def test_a_document_of_the_schema_is_allowed_however_it_is_laid_out():
    document = {"name": "Ida", "count": 7, "kind": None}
    schema = json.dumps(SCHEMAS[1])
    for text in (json.dumps(document), json.dumps(document, indent=2), '{"name":"é","count":-3}'):
        assert accepts(matcher("json", text=schema), tokenizer().encode(text)), text
    assert not accepts(matcher("json", schema), tokenizer().encode('{"count":1,"name":"a","x":1}'))


def test_white_space_cannot_go_on_for_ever():
    one = matcher("json", '{"type":"array","items":{"type":"integer"}}')
    one.advance(plain_ids("[ "))
    assert plain_ids(" ")[0] not in allowed(one)


PATTERNS = [r"[ab]{1,3}c?", r"(a|bc)*", r"^a+b$", r"a/b|c", r"[^a]b", r"(ab?){2}c*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_expression_allows_what_python_matches_and_nothing_else(pattern):
    texts = {"".join(t) for n in range(6) for t in itertools.product("abc/", repeat=n)}
    expected = {text for text in texts if re.fullmatch(pattern, text)}
    assert _texts_of(matcher("regex", pattern), "", 5) == expected


def _texts_of(one: GrammarMatcher, begun: str, most: int) -> set[str]:
    """The whole texts of a, b, c and / that go on from `begun`, of at most `most` letters."""
    found = {begun} if one.is_accepting else set()
    next_ids = allowed(one) if len(begun) < most else ()
    for letter, token in zip("abc/", plain_ids("abc/"), strict=True):
        if token in next_ids:
            one.advance([token])
            found |= _texts_of(one, begun + letter, most)
            one.rollback(1)
    return found


def _sentences(rules: dict[str, list[list[str]]], most: int) -> set[str]:
    """All texts of at most `most` letters of a grammar in upper case names, by rewriting."""
    done, seen, forms = set(), {("S",)}, [("S",)]
    while forms:
        form = forms.pop()
        place = next((i for i, part in enumerate(form) if part.isupper()), None)
        if place is None:
            done.add("".join(form))
            continue
        for option in rules[form[place]]:
            new = (*form[:place], *option, *form[place + 1 :])
            letters = sum(not part.isupper() for part in new)
            if letters <= most and len(new) <= most + 3 and new not in seen:
                seen.add(new)
                forms.append(new)
    return done


GRAMMARS = [
    ('root ::= "a" root "b" | "c"', {"S": [["a", "S", "b"], ["c"]]}),
    # A word that the longest match would take away from the literal behind it.
    (
        'root ::= [ab]+ "ab" # comment\n',
        {"S": [["X", "a", "b"]], "X": [["a"], ["b"], ["X", "a"], ["X", "b"]]},
    ),
    (
        'root ::= ("ab" | "a") x?\nx ::= "b"\n  | "\\x63"',
        {"S": [["a", "b", "X"], ["a", "X"]], "X": [[], ["b"], ["c"]]},
    ),
    ('root ::= y{1,2} y\ny ::= "" | "a"', {"S": [["Y", "Y"], ["Y", "Y", "Y"]], "Y": [[], ["a"]]}),
    (
        'root ::= sum\nsum ::= sum "a" one | one\none ::= "b" | "c" sum "c"',
        {"S": [["S", "a", "T"], ["T"]], "T": [["b"], ["c", "S", "c"]]},
    ),
]


@pytest.mark.parametrize(("text", "rules"), GRAMMARS)
def test_grammar_allows_a_beginning_if_and_only_if_it_can_be_completed(text, rules):
    most = 4  # letters of a beginning; the longest way to complete one has five more
    sentences = _sentences(rules, most + 5)
    beginnings = {one[:n] for one in sentences for n in range(len(one) + 1)}
    letters = dict(zip("abc", plain_ids("abc"), strict=True))
    stop = tokenizer().stop_ids[0]
    walked = [""]
    while walked:
        begun = walked.pop()
        one = matcher("grammar", text)
        one.advance(plain_ids(begun))
        next_ids = set(allowed(one).tolist())
        assert (stop in next_ids) == (begun in sentences), begun
        for letter, token in letters.items():
            assert (token in next_ids) == (begun + letter in beginnings), begun + letter
            if begun + letter in beginnings and len(begun) + 1 < most:
                walked.append(begun + letter)


def test_grammar_sets_ranges_and_escapes():
    text = r'root ::= [a-c\-é] [^\]\n] "\"\u00e9\\" . [x-]'
    for reply, expected in [
        ('b["é\\qx', True),
        ('-a"é\\\n-', True),
        ('é]"é\\qx', False),
        ('d["é\\qx', False),
    ]:
        assert accepts(matcher("grammar", text), plain_ids(reply)) == expected, reply


def test_lark_is_taken_as_it_is():
    assert accepts(matcher("grammar", 'start: "a" B\nB: /[0-9]+/'), plain_ids("a12"))


def test_choice_allows_the_choices_alone():
    choices = '["yes", "yes, sir", "no"]'
    for text in ("yes", "yes, sir", "no"):
        assert accepts(matcher("choice", choices), tokenizer().encode(text))
    for text in ("ye", "yes,", "noo"):
        assert not accepts(matcher("choice", choices), tokenizer().encode(text))


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("json", "{", "the JSON schema is no JSON"),
        ("json", "[1]", "the JSON schema is a list, expected an object"),
        ("json", "false", "which no value satisfies"),
        ("json", '{"type":"objekt"}', "json cannot be compiled"),
        ("json", '{"not":{"type":"string"}}', "json cannot be compiled"),
        ("regex", "(a", "regex cannot be compiled"),
        ("regex", r"(a)\1", "regex cannot be compiled"),
        ("choice", "[]", "choice names no text to choose"),
        ("choice", '["a", 1]', "expected a list of texts"),
        ("grammar", 'a ::= "b"', "the grammar has no rule 'root'"),
        ("grammar", 'root ::= "b" x', "the grammar has no rule 'x'"),
        ("grammar", 'root ::= "b\nroot ::= "c"', "cannot be read at"),
        ("grammar", 'root ::= "b"\nroot ::= "c"', "gives the rule 'root' twice"),
        ("grammar", "root ::= [z-a]", "backwards"),
        ("grammar", r'root ::= "\q"', r"the escape \\q, unknown"),
        ("grammar", 'root ::= ("a"', "grammar cannot be compiled"),
        ("json", "[" * 100_000, "nested too deeply"),
        ("regex", "a" * 300_000, "has 300000 characters, at most 262144 are compiled"),
        ("grammar", f'root ::= "{"a" * 250_000}"', r"number of symbols\) too big"),
    ],
)
def test_what_is_no_grammar_is_refused_with_a_sentence(kind, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        matcher(kind, text)


def test_grammar_that_outgrows_its_limits_says_so():
    one = outgrowing()
    one.advance(plain_ids("x"))
    with pytest.raises(RuntimeError, match="the grammar cannot go on after 1 tokens: "):
        one.mask()
    output = StructuredOutput(kind="grammar", text="root ::= [a-z]*")
    with pytest.raises(ValueError, match="grammar cannot be compiled: .* Too many items"):
        Grammars(vocabulary(), GrammarLimits(mask_items=20)).matcher(output, Thought.OVER, ())
    with pytest.raises(ValueError, match="mask_items=0 is not at least 1"):
        GrammarLimits(mask_items=0)


def test_equal_requests_share_a_grammar_and_the_oldest_goes():
    shared = Grammars(vocabulary(), GrammarLimits(num_cached=2))

    def ask(text):
        output = StructuredOutput(kind="regex", text=text)
        return shared.matcher(output, Thought.OVER, tokenizer().stop_ids)

    first, second = ask("a+"), ask("a+")
    first.advance(plain_ids("aa"))
    assert (first.num_tokens, second.num_tokens, shared.num_compiled) == (2, 0, 1)
    for text in ("b", "a+", "c", "a+"):
        ask(text)
    assert (len(shared), shared.num_compiled) == (2, 3)
    ask("b")
    assert (len(shared), shared.num_compiled) == (2, 4)


def test_a_refused_grammar_is_not_kept():
    shared = Grammars(vocabulary())
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be compiled"):
            shared.matcher(StructuredOutput(kind="regex", text="(a"), Thought.OVER, ())
    assert len(shared) == 0


def test_threads_that_ask_at_once_compile_once():
    shared, barrier, made = Grammars(vocabulary()), threading.Barrier(4), []

    def ask():
        barrier.wait()
        output = StructuredOutput(kind="json", text=json.dumps(SCHEMAS[2]))
        made.append(shared.matcher(output, Thought.OVER, tokenizer().stop_ids))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), shared.num_compiled) == (4, 1)
    assert len({one.mask().tobytes() for one in made}) == 1
