"""Text in and out: chat template, tokenizer and the split of an answer into thought and content."""

from minimax_jax.chat.detokenize import DecodeStream, StopMatch, TextStream
from minimax_jax.chat.messages import read_messages
from minimax_jax.chat.reasoning import Reply, split_reasoning
from minimax_jax.chat.template import ChatTemplate
from minimax_jax.chat.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "DecodeStream",
    "Reply",
    "StopMatch",
    "TextStream",
    "Tokenizer",
    "read_messages",
    "split_reasoning",
]
