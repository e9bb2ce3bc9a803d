"""Trains the bundled byte-level BPE tokenizer: `minimax-train tokenizer minimax_jax/assets/tiny`.

The text is the generated problems' own. The vocabulary is 256 bytes, then merges, then the M3
markers as added, non-special tokens. A digit is always a token of its own, so numbers are read and
written column by column; a frequent word with its space is one token. The embedding has
`VOCABULARY_ROWS` rows, of which the last few stay unused, as in the released models.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from minimax_jax.chat.template import ChatTemplate
from rl.data import LEDGERS, SHORT, messages, problems

VOCABULARY_ROWS = 512
# A bound: merging ends earlier, once each word of the problems is one token.
BPE_TOKENS = 496
BOS, EOS = "]~!b[", "[e~["
CONTEXT_TOKENS = 2048
# The released models' own spelling (specification model 4.1), in their order.
MARKERS = (
    "]~b]",
    EOS,
    "]<]image[>[",
    "]<]video[>[",
    "]<]start of image[>[",
    "]<]end of image[>[",
    BOS,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "]<]minimax[>[",
    "<mm:think>",
    "</mm:think>",
)
# One digit; ", " or ": "; a word with its space; one sign with its space; white space one by one.
PIECES = r"\p{N}|[,:] | ?\p{L}+| ?[^\s\p{L}\p{N}]|\s"

# How many problems of the short and of the ledger families the merges are learned from.
TRAIN_SHORT, TRAIN_LEDGERS = 8000, 200
# Words of the chat template that no problem uses, and how often they count.
TEMPLATE_WORDS = "system\ndeveloper\ntool\n<response>\n# Tools\n<tools>\n<invoke name=\n"
TEMPLATE_WORDS_COUNT = 100


def train_tokenizer(folder: str | Path) -> Tokenizer:
    """Trains on the generated problems and writes tokenizer.json, its config and the generation
    defaults.

    `folder` must hold the chat template. Deterministic: the same bytes each time.
    """
    folder = Path(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(_texts(ChatTemplate.load(folder)), _trainer())
    tokenizer.add_tokens(
        [AddedToken(marker, special=False, normalized=False) for marker in MARKERS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_json(folder / "generation_config.json", _generation_config(tokenizer))
    return tokenizer


def _trainer() -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=BPE_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _texts(template: ChatTemplate) -> Iterator[str]:
    """Rendered conversations with the markers cut out, which are never merged from pieces."""
    for families, count in ((SHORT, TRAIN_SHORT), (LEDGERS, TRAIN_LEDGERS)):
        for problem in problems(count=count, families=families):
            text = template.render(messages(problem), add_generation_prompt=False)
            for marker in MARKERS:
                text = text.replace(marker, "\n")
            yield text
    yield TEMPLATE_WORDS * TEMPLATE_WORDS_COUNT


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
    }


def _generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "do_sample": True,
        "temperature": 1.0,
    }


def _write_json(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
