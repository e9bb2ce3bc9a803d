"""Parts of a grammar that are put together before they become Lark.

llguidance takes the longest lexeme. What has no sure end, such as free text, must therefore be one
lexeme with the text behind it, or stand before a control token, which ends every lexeme. `Lexeme`
and `FreeText` are regular and can be merged; a `Rule` is anything else.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

ANY = "/(?s:.*)/"


@dataclass(frozen=True)
class Lexeme:
    """A regular expression in Lark's words. `is_open`: the longest match may be too long."""

    expression: str
    is_open: bool = False


@dataclass(frozen=True)
class FreeText:
    """Text in which none of `excludes` occurs. Of the control tokens it may hold the namespace's
    alone, for nested arguments, and only where a control token or nothing follows.
    """

    excludes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """Lark's words. `is_sharp`: it begins with a control token, where it is not empty."""

    expression: str
    is_sharp: bool = False
    may_be_empty: bool = False
    is_open: bool = False


Piece = Lexeme | FreeText | Rule
Pieces = tuple[Piece, ...]


def join(parts: Iterable[Pieces]) -> Pieces:
    """The parts one after another, what is open merged with the regular text behind it. ValueError
    when something open stands before what can neither be merged nor tells its own beginning.
    """
    pieces: list[Piece] = []
    for piece in (piece for part in parts for piece in part):
        last = pieces[-1] if pieces else None
        if isinstance(last, Lexeme | FreeText) and is_open(last) and not isinstance(piece, Rule):
            pieces[-1] = _merged(last, piece)
        else:
            pieces.append(piece)
    for place, (piece, following) in enumerate(pairwise(pieces)):
        if is_open(piece) and not starts_sharp(pieces[place + 1 :]):
            shown = "free text" if isinstance(following, FreeText) else following.expression
            raise ValueError(
                "structural_tag has a free text, a regular expression or a choice whose end cannot "
                f"be told from what follows, {shown[:60]!r}"
            )
    return tuple(pieces)


def with_excludes(pieces: Pieces, excludes: Sequence[str]) -> Pieces:
    """The pieces, the last of which excludes these texts too, if it is free text."""
    if not pieces or not isinstance(pieces[-1], FreeText):
        return pieces
    last = pieces[-1]
    added = tuple(text for text in excludes if text not in last.excludes)
    return (*pieces[:-1], replace(last, excludes=last.excludes + added))


def is_open(piece: Piece) -> bool:
    """Whether the longest match of the piece may take away what follows it."""
    return isinstance(piece, FreeText) or piece.is_open


def starts_sharp(pieces: Sequence[Piece]) -> bool:
    """Whether a control token, or the end, comes first."""
    for piece in pieces:
        if not (isinstance(piece, Rule) and piece.is_sharp):
            return False
        if not piece.may_be_empty:
            return True
    return True


def may_be_empty(pieces: Pieces) -> bool:
    """Whether every piece is a rule that may be empty."""
    return all(isinstance(piece, Rule) and piece.may_be_empty for piece in pieces)


def text_without(excludes: Sequence[str]) -> str:
    """The expression of all texts in which no exclude occurs."""
    if not excludes:
        return ANY
    listed = " | ".join(map(json.dumps, excludes))
    return f"({ANY} & ~({ANY} ({listed}) {ANY}))"


def _merged(first: Lexeme | FreeText, second: Lexeme | FreeText) -> Lexeme:
    texts = [
        text_without(piece.excludes) if isinstance(piece, FreeText) else piece.expression
        for piece in (first, second)
    ]
    # Free text before a text that it excludes ends exactly there.
    excluded = isinstance(first, FreeText) and texts[1] in map(json.dumps, first.excludes)
    return Lexeme(f"({texts[0]} {texts[1]})", is_open=not excluded)
