"""The scanner: the same markers for every cut, nothing lost, and little held back."""

import pytest

from minimax_jax.chat.dialects import M2, M3
from minimax_jax.chat.markers import Kind, Marker, Scanner
from tests.chat.replies import NS, chunks, spelled

LONG = "n" * 256
M3_TAGS = [
    *("<mm:think>", "</mm:think>", "~<tool_call>", "~</tool_call>", "~</invoke>", "~<a b>", "~</>"),
    *('~<invoke name="f">', "~ \n<invoke \t name='g' >", "~<invoke name=f.g>", f"~<{LONG}>"),
    f"~        <invoke        name={LONG}        >",
    f'~<invoke name="{LONG}">',
]
M2_TAGS = [
    *("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", "</invoke>"),
    *('<invoke name="f">', "<invoke  name='g' >", '<parameter name="a b">', "</parameter>"),
    f"<parameter        name={LONG}        >",
]
LONGEST = len(NS) + 8 + 2 + 290


def texts(tokens) -> str:
    return "".join(token.raw if isinstance(token, Marker) else token for token in tokens)


@pytest.mark.parametrize(
    ("dialect", "tag"),
    [*((M3, spelled(tag)) for tag in M3_TAGS), *((M2, tag) for tag in M2_TAGS)],
)
def test_a_marker_is_held_until_it_is_whole(dialect, tag):
    scanner = Scanner(dialect)
    assert scanner.push("x") == ["x"]
    assert [scanner.push(character) for character in tag[:-1]] == [[]] * (len(tag) - 1)
    [marker] = scanner.push(tag[-1])
    assert isinstance(marker, Marker) and marker.raw == tag and marker.kind is not Kind.CUT
    assert Scanner(dialect).push(f"x{tag}y") == ["x", marker, "y"]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "~<" + "n" * 300,
            "~<a\nb>",
            "~<invoke nam='f'>",
            "~<invoke name='f\n'>",
            "~         <a>",
        ),
        *(
            "~<invoke name=''>",
            "~<invoke name='a<b'>",
            "~<invoke name='a>b'>",
            "~<invoke name=>",
            "~" * 40,
            "~<" * 40,
        ),
        f'~<invoke name="{LONG}n">',
    ],
)
def test_what_is_no_tag_is_text_and_little_of_it_is_held(text):
    text = spelled(text)
    for size in (1, 5, len(text)):
        scanner, tokens = Scanner(M3), []
        for piece in chunks(text, size):
            tokens += scanner.push(piece)
            assert len(scanner._held) <= LONGEST
        tokens += scanner.finish()
        kinds = {token.kind for token in tokens if isinstance(token, Marker)}
        assert texts(tokens) == text and kinds <= {Kind.CUT}


def test_a_tag_that_the_end_cuts_off_is_told_apart_from_text():
    for text, last in [("a~<ci", Kind.CUT), ("a~", Kind.CUT), ("a~<ci ]", Kind.CUT)]:
        scanner = Scanner(M3)
        tokens = [*scanner.push(spelled(text)), *scanner.finish()]
        assert tokens[0] == "a" and tokens[-1].kind is last
    scanner = Scanner(M3)
    assert scanner.push("a]<]mini") == ["a"] and scanner.finish() == ["]<]mini"]


def test_a_declared_key_with_a_bracket_waits_for_its_bracket():
    scanner = Scanner(M3, ["a>b", "a"])
    assert scanner.push(f"{NS}<a>") == []
    assert scanner.push("b>") == [Marker(Kind.OPEN, "a>b", f"{NS}<a>b>")]
    assert scanner.push(f"{NS}<a>") == []
    assert scanner.push("c") == [Marker(Kind.OPEN, "a", f"{NS}<a>"), "c"]
    assert scanner.push(f"{NS}<a>b") == []
    assert scanner.finish() == [Marker(Kind.OPEN, "a", f"{NS}<a>"), "b"]
