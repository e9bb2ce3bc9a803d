"""Writes pieces as a grammar in Lark: names lexemes, and control tokens by their ids."""

import json
from collections.abc import Sequence
from itertools import permutations

from serving.grammar.lark_pieces import (
    ANY,
    Lexeme,
    Piece,
    Pieces,
    Rule,
    is_open,
    may_be_empty,
    starts_sharp,
    text_without,
)
from serving.grammar.vocabulary import GrammarVocabulary


class LarkText:
    """A grammar as it grows. `namespace` is the text of the control token before M3's tags."""

    def __init__(self, vocabulary: GrammarVocabulary, namespace: str):
        self._vocabulary = vocabulary
        self.namespace = namespace
        self._lexemes: dict[str, str] = {}
        self._rules: dict[str, str] = {}

    def literal(self, text: str) -> Pieces:
        """Just this text. A control token in it is that token, never its spelling."""
        return tuple(self._literal_piece(part) for part in self._vocabulary.split(text))

    def either(self, options: Sequence[Pieces]) -> Pieces:
        """One of the options, of which () is the empty one."""
        if all(isinstance(piece, Lexeme) for option in options for piece in option):
            return (_either_lexeme(options),)
        full = [option for option in options if option]
        expressions = [f"({self.rule(option)})" for option in full]
        empty = len(full) < len(options)
        return (
            Rule(
                self._rule_name(" | ".join(expressions)) + ("?" if empty else ""),
                is_sharp=all(map(starts_sharp, full)),
                may_be_empty=empty or any(map(may_be_empty, full)),
                is_open=any(is_open(option[-1]) for option in full),
            ),
        )

    def repeat(self, pieces: Pieces, times: str, *, from_none: bool) -> Pieces:
        """The pieces as often as Lark's `times` says: `*`, `+` or `{2,5}`."""
        if not pieces:
            return ()
        if len(pieces) == 1 and isinstance(pieces[0], Lexeme):
            return (Lexeme(f"({pieces[0].expression}){times}", is_open=True),)
        open_end, sharp = is_open(pieces[-1]), starts_sharp(pieces)
        if open_end and not sharp:
            raise ValueError("structural_tag repeats a part whose end cannot be told")
        empty = from_none or may_be_empty(pieces)
        expression = self._rule_name(self.rule(pieces)) + times
        return (Rule(expression, is_sharp=sharp, may_be_empty=empty, is_open=open_end),)

    def rule(self, pieces: Pieces) -> str:
        """Lark's words for the pieces in a rule."""
        return " ".join(map(self._written, pieces)) if pieces else '""'

    def grammar(self, pieces: Pieces) -> str:
        """The whole grammar, which begins with the pieces."""
        lines = [f"start: {self.rule(pieces)}"]
        named = {**self._rules, **self._lexemes}
        lines += [f"{name}: {expression}" for expression, name in named.items()]
        return "\n".join(lines) + "\n"

    def _written(self, piece: Piece) -> str:
        if isinstance(piece, Rule):
            return piece.expression
        if isinstance(piece, Lexeme):
            return self._name(piece.expression)
        text = text_without(piece.excludes)
        parts = [self._vocabulary.split(exclude) for exclude in piece.excludes]
        behind = [part[1] for part in parts if part[0] == self.namespace and len(part) == 2]
        token = self._vocabulary.control_id(self.namespace)
        # An exclude that is more than the namespace and one text behind it bans the namespace.
        banned = any(self.namespace in part for part in parts if part[0] != self.namespace)
        banned |= any(part[0] == self.namespace and len(part) != 2 for part in parts)
        name = self._name(text)
        if token is None or banned:
            return name
        return f"{name} (<[{token}]> {self._name(_tag_text(text, behind))})*"

    def _literal_piece(self, part: str) -> Piece:
        token = self._vocabulary.control_id(part)
        if token is None:
            return Lexeme(json.dumps(part))
        return Rule(f"<[{token}]>", is_sharp=True)

    def _rule_name(self, expression: str) -> str:
        known = expression in self._rules.values()
        return (
            expression if known else self._rules.setdefault(expression, f"rule_{len(self._rules)}")
        )

    def _name(self, expression: str) -> str:
        return self._lexemes.setdefault(expression, f"LEXEME_{len(self._lexemes)}")


def _tag_text(text: str, not_beginning: Sequence[str]) -> str:
    """The free text behind a namespace: it begins a tag, but none of these."""
    tag = f'{text} & ("<" {ANY})'
    if not not_beginning:
        return f"({tag})"
    return f"({tag} & ~(({' | '.join(map(json.dumps, not_beginning))}) {ANY}))"


def _either_lexeme(options: Sequence[Pieces]) -> Lexeme:
    texts = [
        " ".join(piece.expression for piece in option if isinstance(piece, Lexeme)) or '""'
        for option in options
    ]
    literals = [json.loads(text) for text in texts if _is_literal(text)]
    sure = len(literals) == len(texts)
    sure = sure and not any(one.startswith(two) for one, two in permutations(literals, 2))
    return Lexeme(f"({' | '.join(texts)})", is_open=not sure)


def _is_literal(expression: str) -> bool:
    try:
        return isinstance(json.loads(expression), str)
    except ValueError:
        return False
