"""Named shapes of every op: those of the small model, and those of the full one on one rank.

Tests run the small ones, the benchmark runs all. A full-size rank is one of four (`tp4`): 16 query
heads, one key/value head, one index head. Numbers repeat the model presets, since kernels know no
configs; a test compares them.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Queries of B tiles over contexts of S tokens: selection, attention, insertion."""

    batch: int  # B
    queries: int  # T of a tile: 1 or 8 when decoding or verifying, a block when prefilling
    context: int  # S
    heads: int  # N
    kv_heads: int  # K, and as many index heads
    head_dim: int  # H
    index_dim: int  # I
    block_size: int  # Z
    top_k: int  # C
    format: str = "nvfp4"  # of keys, values and index keys

    @property
    def blocks(self) -> int:
        """P of one sequence."""
        return -(-self.context // self.block_size)

    @property
    def title(self) -> str:
        """`16 x 128K, 8 queries`."""
        queries = "1 query" if self.queries == 1 else f"{self.queries} queries"
        return f"{self.batch} x {self.context // 1024}K, {queries}"


@dataclass(frozen=True, kw_only=True)
class WindowCase:
    """A drafter's block of T queries of B sequences over a window of pages."""

    batch: int  # B
    queries: int  # T
    context: int  # S
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    block_size: int  # Z
    window: int
    format: str = "fp8"


@dataclass(frozen=True, kw_only=True)
class MatmulCase:
    """M rows of width D times one weight [F, D], or each row's own of [E, F, D]."""

    rows: int  # M, after every token is repeated for each of its experts
    in_dim: int  # D
    out_dim: int  # F
    experts: int = 0  # E
    format: str = "bf16"


_TINY = AttentionCase(
    batch=4,
    queries=1,
    context=512,
    heads=8,
    kv_heads=4,
    head_dim=32,
    index_dim=32,
    block_size=16,
    top_k=4,
)
_FULL = AttentionCase(
    batch=32,
    queries=1,
    context=32_768,
    heads=16,
    kv_heads=1,
    head_dim=128,
    index_dim=128,
    block_size=128,
    top_k=16,
)

ATTENTION = {
    "tiny_decode": _TINY,
    "tiny_verify": replace(_TINY, queries=8),
    "tiny_prefill": replace(_TINY, batch=16, queries=16, context=256),
    "full_decode_32k": _FULL,
    "full_decode_128k": replace(_FULL, context=131_072),
    "full_decode_1m": replace(_FULL, batch=4, context=1_048_576),
    "full_verify_32k": replace(_FULL, queries=8),
    "full_prefill_32k": replace(_FULL, batch=256, queries=128),
}

_WHOLE = replace(_FULL, batch=1, context=524_288, heads=64, kv_heads=4)
# The full model on one rank, in the cases that other engines' kernels were measured on.
ONE_RANK = {
    "decode_512k": _WHOLE,
    "verify_512k": replace(_WHOLE, queries=8),
    "decode_64x128k": replace(_WHOLE, batch=64, context=131_072),
    "verify_16x128k": replace(_WHOLE, batch=16, context=131_072, queries=8),
    "decode_32x32k": replace(_WHOLE, batch=32, context=32_768),
    "verify_32x32k": replace(_WHOLE, batch=32, context=32_768, queries=8),
    "decode_32k": replace(_WHOLE, context=32_768),
    "prefill_16k": replace(_WHOLE, batch=128, context=16_384, queries=128),
}

WINDOW = {
    "tiny_draft": WindowCase(
        batch=4, queries=4, context=512, heads=8, kv_heads=4, head_dim=32, block_size=16, window=128
    ),
    "full_draft": WindowCase(
        batch=32,
        queries=7,
        context=32_768,
        heads=16,
        kv_heads=1,
        head_dim=128,
        block_size=128,
        window=4096,
    ),
}

DENSE = {
    "tiny_q": MatmulCase(rows=256, in_dim=128, out_dim=256, format="mxfp8"),
    "full_qkv_decode": MatmulCase(rows=32, in_dim=6144, out_dim=2560, format="mxfp8"),
    "full_qkv_prefill": MatmulCase(rows=8192, in_dim=6144, out_dim=2560, format="mxfp8"),
    "full_head_decode": MatmulCase(rows=32, in_dim=6144, out_dim=50_016),
}

_QKV = MatmulCase(rows=1, in_dim=6144, out_dim=9856, format="mxfp8")  # with the index projections
# The dense products of a full-size layer on one rank; `gate_up` is two weights at once.
LINEAR = {
    "qkv": [replace(_QKV, rows=rows) for rows in (1, 8, 16, 32, 64, 128, 512, 8192)],
    "o": [replace(_QKV, in_dim=8192, out_dim=6144, rows=rows) for rows in (1, 32)],
    "gate_up": [replace(_QKV, out_dim=3072, rows=rows) for rows in (1, 32)],
    "down": [replace(_QKV, in_dim=3072, out_dim=6144, rows=rows) for rows in (1, 32)],
    "head": [replace(_QKV, out_dim=200_064, rows=rows, format="bf16") for rows in (1, 32)],
}

GROUPED = {
    "tiny_up": MatmulCase(rows=1024, in_dim=128, out_dim=64, experts=16, format="nvfp4"),
    "full_up_decode_1": MatmulCase(rows=4, in_dim=6144, out_dim=768, experts=128, format="nvfp4"),
    "full_up_decode_32": MatmulCase(
        rows=128, in_dim=6144, out_dim=768, experts=128, format="nvfp4"
    ),
    "full_up_prefill": MatmulCase(
        rows=32_768, in_dim=6144, out_dim=768, experts=128, format="nvfp4"
    ),
}


@dataclass(frozen=True, kw_only=True)
class MoECase:
    """T tokens of width D through X of E experts of width F each."""

    tokens: int  # T
    choices: int  # X
    experts: int  # E
    width: int  # D
    expert_width: int  # F
    skewed: bool = False  # all tokens to the same X experts


_FULL_MOE = MoECase(tokens=1, choices=4, experts=128, width=6144, expert_width=3072)
MOE = {
    **{f"full_{n}": replace(_FULL_MOE, tokens=n) for n in (1, 8, 32, 128, 512, 4096, 16_384)},
    **{f"full_{n}_skewed": replace(_FULL_MOE, tokens=n, skewed=True) for n in (32, 128, 512, 4096)},
}
