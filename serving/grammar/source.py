"""What a request asks for, as llguidance's grammar, with the thought that comes before it."""

import json
from enum import Enum
from typing import Any

from minimax_jax.chat.dialects import Dialect
from serving.grammar.ebnf import ebnf_to_lark
from serving.grammar.json_grammar import json_grammar, read_schema
from serving.grammar.lark_pieces import text_without
from serving.grammar.structural_tags import regex_literal, structural_tag_to_lark
from serving.grammar.vocabulary import GrammarVocabulary
from serving.scheduling.sampling_params import StructuredOutput


class Thought(Enum):
    """Where a reply begins: in an open thought, where the model may open one, or after it."""

    OPEN = "open"
    POSSIBLE = "possible"
    OVER = "over"


def thought_after(prompt_end: str, dialect: Dialect) -> Thought:
    """Read from the last characters of the rendered prompt, as the parser of replies reads it."""
    if prompt_end.rstrip().endswith(dialect.think_start):
        return Thought.OPEN
    closed = prompt_end.rstrip().endswith(dialect.think_end)
    return Thought.OVER if closed else Thought.POSSIBLE


def grammar_source(
    output: StructuredOutput, thought: Thought, vocabulary: GrammarVocabulary, dialect: Dialect
) -> str:
    """llguidance's JSON of grammars. ValueError with a sentence for what cannot be one."""
    body = _body(output, vocabulary, dialect)
    if output.from_first_token or thought is Thought.OVER:
        return json.dumps({"grammars": [body]})
    opening = _thought(thought, vocabulary, dialect)
    return json.dumps({"grammars": [{"lark_grammar": opening}, {"name": "body", **body}]})


def _body(
    output: StructuredOutput, vocabulary: GrammarVocabulary, dialect: Dialect
) -> dict[str, Any]:
    text = output.text
    if output.kind == "json":
        return {"json_schema": json_grammar(read_schema(text))}
    if output.kind == "regex":
        return {"lark_grammar": f"start: {regex_literal(text)}\n"}
    if output.kind == "choice":
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {_choices(text)}\n"}
    if output.kind == "structural_tag":
        return {"lark_grammar": structural_tag_to_lark(text, vocabulary, dialect)}
    # Whoever writes Lark itself gets llguidance's own dialect of it.
    return {"lark_grammar": ebnf_to_lark(text) if "::=" in text else text}


def _choices(text: str) -> str:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise ValueError(f"choice is no JSON: {error}") from error
    if not isinstance(choices, list) or not all(isinstance(one, str) and one for one in choices):
        raise ValueError(f"choice={choices!r}, expected a list of texts, none of them empty")
    if not choices:
        raise ValueError("choice names no text to choose")
    return " | ".join(map(json.dumps, choices))


def _thought(thought: Thought, vocabulary: GrammarVocabulary, dialect: Dialect) -> str:
    """The grammar up to the end of the thought: a marker is its token, or spelled by several."""
    start, end = (_marker(m, vocabulary) for m in (dialect.think_start, dialect.think_end))
    begun = "rest" if thought is Thought.OPEN else f"({start} rest | {end})?"
    text = text_without([dialect.think_start, dialect.think_end])
    token = vocabulary.control_id(dialect.think_end)
    by_token = "" if token is None else f"TEXT <[{token}]> | "
    return (
        f"start: {begun} @body\n"
        f"rest: {by_token}SPELLED\n"
        f"TEXT: {text}\n"
        f"SPELLED: {text} {json.dumps(dialect.think_end)}\n"
    )


def _marker(text: str, vocabulary: GrammarVocabulary) -> str:
    token = vocabulary.control_id(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
