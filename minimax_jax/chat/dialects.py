"""How each generation of the model spells its markers (specification model 4.1, 4.2).

M3 and M3.1 write a namespace marker in front of each tag of a call, name a parameter by its tag
and nest: `NS<city>Paris NS</city>`. M2 has no namespace, names a parameter by an attribute and does
not nest: `<parameter name="city">Paris</parameter>`. Both name the function by an attribute.
"""

import re
from dataclasses import dataclass
from functools import cached_property

NAMESPACE = "]<]minimax[>["
# The functions of MCP servers have names of up to some 130 characters; parameters, of some 60.
MAX_NAME = 256

# name="f", name='f' or name=f
_ATTRIBUTE = (
    rf"""[ \t]{{1,8}}name=(?:"(?P<double>[^"<>\n]{{1,{MAX_NAME}}})"|"""
    rf"""'(?P<single>[^'<>\n]{{1,{MAX_NAME}}})'|(?P<bare>[^\s<>"']{{1,{MAX_NAME}}}))[ \t]{{0,8}}"""
)
# What may still become a tag, and room for the rest of the longest one.
_PARTIAL = rf"[^<>\n]{{0,{MAX_NAME + 32}}}"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The markers of one generation, as patterns of bounded length.

    `leads` are the literals with which a marker can begin. `tag` matches a whole tag; it has the
    groups `opened` and `closed` for the tag's word, `called` for the word of one with an attribute,
    and `double`, `single` or `bare` for the attribute. `partial` matches every beginning of a tag.
    `block` and `call` are the words of what holds calls and of a call.
    """

    think_start: str
    think_end: str
    namespace: str
    block: str
    call: str
    leads: tuple[str, ...]
    tag: re.Pattern[str]
    partial: re.Pattern[str]

    @cached_property
    def lead(self) -> re.Pattern[str]:
        """Finds the next lead."""
        return re.compile("|".join(map(re.escape, self.leads)))


_M3_TAG = rf"{re.escape(NAMESPACE)}\s{{0,8}}<"
M3 = Dialect(
    think_start="<mm:think>",
    think_end="</mm:think>",
    namespace=NAMESPACE,
    block="tool_call",
    call="invoke",
    leads=("<mm:think>", "</mm:think>", NAMESPACE),
    # No tags: a thought's marker behind a stray namespace, and a call's opener without its name.
    tag=re.compile(
        rf"{_M3_TAG}(?:(?P<called>invoke){_ATTRIBUTE}"
        rf"|/(?!mm:think>)(?P<closed>[^<>\n]{{0,{MAX_NAME}}})"
        rf"|(?!/|mm:think>|invoke[ \t])(?P<opened>[^<>\n]{{0,{MAX_NAME}}}))>"
    ),
    partial=re.compile(rf"{re.escape(NAMESPACE)}\s{{0,8}}(?:<{_PARTIAL})?"),
)

M2 = Dialect(
    think_start="<think>",
    think_end="</think>",
    namespace="",
    block="minimax:tool_call",
    call="invoke",
    leads=(
        *("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        *("<invoke", "</invoke>", "<parameter", "</parameter>"),
    ),
    tag=re.compile(
        rf"<(?:(?P<called>invoke|parameter){_ATTRIBUTE}"
        r"|/(?P<closed>minimax:tool_call|invoke|parameter)|(?P<opened>minimax:tool_call))>"
    ),
    partial=re.compile(rf"<(?:invoke|parameter)(?:[ \t]{_PARTIAL})?"),
)
