"""Text in and out: chat template, tokenizer and the split of an answer into thought and content."""

from minimax_jax.chat.detokenize import DecodeStream, StopMatch, TextStream
from minimax_jax.chat.events import Reply, ToolCall
from minimax_jax.chat.messages import read_messages
from minimax_jax.chat.openai import Message, MessageBuilder, MessageDelta, MessageToolCall, Usage
from minimax_jax.chat.parser import ReplyParser, parse_reply
from minimax_jax.chat.prompt import Chat, ChatFormat, Prompt
from minimax_jax.chat.template import ChatTemplate
from minimax_jax.chat.tokenizer import Tokenizer
from minimax_jax.chat.tools import read_tools
from minimax_jax.chat.turns import TurnMemory

__all__ = [
    "Chat",
    "ChatFormat",
    "ChatTemplate",
    "DecodeStream",
    "Message",
    "MessageBuilder",
    "MessageDelta",
    "MessageToolCall",
    "Prompt",
    "Reply",
    "ReplyParser",
    "StopMatch",
    "TextStream",
    "Tokenizer",
    "ToolCall",
    "TurnMemory",
    "Usage",
    "parse_reply",
    "read_messages",
    "read_tools",
]
