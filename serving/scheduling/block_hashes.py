"""The name of a block's content: a chain of hashes over the tokens up to the block's end.

SHA-256 over 32 bytes of the block before and the token ids as 4 bytes each. Two contents with one
hash would take about 2^128 tries to find, so a hit is not compared token by token. The chain starts
at a root of everything beside the tokens that decides the keys: adapter, weights, and the salt.
"""

import json
from array import array
from hashlib import sha256

BlockHash = bytes


def root_hash(
    *, weight_version: int, adapter: str | None, adapter_version: int, salt: str
) -> BlockHash:
    """Where a chain starts: contents under another root never meet."""
    parts = [weight_version, adapter, adapter_version, salt]
    return sha256(json.dumps(parts).encode()).digest()


def extend_chain(
    chain: list[BlockHash], root: BlockHash, tokens: array, block_size: int, num_blocks: int
) -> None:
    """Lengthens `chain` in place to the hashes of the first `num_blocks` full blocks of tokens."""
    view, width = memoryview(tokens).cast("B"), block_size * tokens.itemsize
    before = chain[-1] if chain else root
    for start in range(len(chain) * width, num_blocks * width, width):
        hasher = sha256(before)
        hasher.update(view[start : start + width])
        before = hasher.digest()
        chain.append(before)
    view.release()


def event_id(block_hash: BlockHash) -> int:
    """The 64-bit signed id of a block in KV events: the first 8 bytes of its hash."""
    return int.from_bytes(block_hash[:8], "big", signed=True)
