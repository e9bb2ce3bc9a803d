"""The shapes that are compiled: few, enough for every plan, and none that no plan can have."""

import pytest

from configs.serving import ServingConfig
from serving.scheduling.shapes import Shapes

FULL = ServingConfig(num_speculative_tokens=0)


def reached(config: ServingConfig, num_blocks: int) -> set:
    """The shapes of every plan there can be, by trying out all sizes."""
    shapes, found = Shapes(config, num_blocks), set()
    for pages in range(1, min(config.max_blocks, num_blocks) + 1):
        blocks = min(shapes.max_prefill_rows * pages, num_blocks)
        most = min(config.max_num_batched_tokens, blocks * config.block_size)
        found |= {shapes.prefill(tokens=tokens, pages=pages) for tokens in range(1, most + 1)}
        for rows in range(1, min(config.max_num_seqs, num_blocks - pages + 1) + 1):
            for tokens in range(rows, rows * (1 + config.num_speculative_tokens) + 1):
                for steps in {1, shapes.many_steps}:
                    sizes = {"rows": rows, "tokens": tokens, "pages": pages, "steps": steps}
                    found.add(shapes.decode(**sizes))
    return found


@pytest.mark.parametrize("num_blocks", [1, 5, 40, 1000])
@pytest.mark.parametrize("drafts", [0, 3, 7])
@pytest.mark.parametrize("max_model_len", [16, 200])
def test_the_shapes_are_exactly_those_that_plans_can_have(num_blocks, drafts, max_model_len):
    config = ServingConfig(
        block_size=4,
        max_model_len=max_model_len,
        max_num_seqs=6,
        max_num_batched_tokens=300,
        num_speculative_tokens=drafts,
    )
    shapes = list(Shapes(config, num_blocks).all())
    assert len(shapes) == len(set(shapes))
    assert set(shapes) == reached(config, num_blocks)


def test_the_full_size_has_a_small_set():
    assert len(list(Shapes(FULL, 100_000).all())) == 30
    drafting = ServingConfig(num_speculative_tokens=7)
    assert len(list(Shapes(drafting, 100_000).all())) == 50


def test_a_shape_is_the_smallest_that_fits():
    shapes = Shapes(FULL, 100_000)
    shape = shapes.decode(rows=5, tokens=5, pages=33, steps=1)
    assert (shape.rows, shape.tokens, shape.pages) == (16, 16, 128)
    assert shapes.decode(rows=17, tokens=17, pages=129, steps=1).pages == 2048
    shape = shapes.prefill(tokens=8192, pages=2048)
    assert (shape.rows, shape.tokens, shape.pages) == (16, 8192, 2048)
    with pytest.raises(AssertionError, match="8193 is beyond the largest bucket 8192"):
        shapes.prefill(tokens=8193, pages=1)
