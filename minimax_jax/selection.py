"""What MSA chose: the blocks that each query of a text attends to, layer by layer, for a look at
the model.
"""

from functools import partial

import jax
import numpy as np
from jaxtyping import Int

from minimax_jax.batch import Batch, pack
from minimax_jax.context import Context
from minimax_jax.loaded import LoadedModel, check_tokens
from minimax_jax.model import Model
from pallas_kernels.layouts.pool import PoolLayout


def chosen_blocks(loaded: LoadedModel, tokens: list[int]) -> dict[int, Int[np.ndarray, "T K C"]]:
    """By sparse layer: the ids of the blocks that each token and key/value head attends to, -1 in
    unused places.
    """
    ids = np.asarray(tokens)
    check_tokens(ids, loaded.config)
    batch, places = pack(ids, np.zeros(len(ids), int), loaded.layout.block_size)
    with loaded.on_mesh():
        chosen = _chosen(loaded.model, batch, loaded.layout)
    return {
        layer: np.asarray(ids_BTKC).reshape(-1, *ids_BTKC.shape[2:])[places]
        for layer, ids_BTKC in chosen.items()
    }


@partial(jax.jit, static_argnames=("layout",))
def _chosen(model: Model, batch: Batch, layout: PoolLayout) -> dict[int, jax.Array]:
    context = Context.of(batch, model.config, layout)
    _, _, after = model.hidden(batch, layout, taps=range(model.config.num_layers))
    before = [model.embedded(batch.tokens), *after[:-1]]
    chosen = {}
    for i, (layer, x) in enumerate(zip(model.layers, before, strict=True)):
        normed = layer.input_norm(x)
        indexer, keys = layer.attention.indexer, layer.attention.packed_keys(normed, context)
        if indexer is not None and keys.index_k is not None:
            chosen[i] = indexer(normed, keys.index_k, context)
    return chosen
