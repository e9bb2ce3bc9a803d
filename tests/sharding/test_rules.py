"""Rules tables: where axes land, and what may not land together."""

import pytest
from jax.sharding import PartitionSpec as P

from configs.parallel import ParallelConfig
from sharding import SERVE, TRAIN, spec, with_parallel


@pytest.mark.parametrize(
    ("rules", "axes", "expected"),
    [
        (SERVE, ("embed", "heads", "head_dim"), P(None, "model", None)),
        (SERVE, ("batch", "tokens", "embed"), P("data", None, None)),
        (SERVE, ("experts", "embed", "expert_mlp"), P(None, None, "model")),
        (SERVE, ("ranks", None, None, None), P(("data", "model"), None, None, None)),
        (SERVE, ("embed", "index_heads", "head_dim"), P(None, "model", None)),
        (TRAIN, ("vocab", "embed"), P("model", "data")),
    ],
)
def test_axes_land_where_the_table_says(rules, axes, expected):
    assert spec(axes, rules) == expected


def test_two_axes_on_one_mesh_axis_are_refused():
    sentence = "'heads' and 'mlp' of one array .* both land on the mesh axis 'model'"
    with pytest.raises(ValueError, match=sentence):
        spec(("heads", "mlp"), SERVE)


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="^'head' is no logical axis; there are batch, tokens"):
        spec(("embed", "head"), SERVE)


def test_expert_parallelism_keeps_experts_whole():
    rules = with_parallel(SERVE, ParallelConfig.parse("dp2,tp2,ep"))
    assert spec(("experts", "embed", "expert_mlp"), rules) == P(("data", "model"), None, None)


def test_sequence_parallelism_splits_tokens():
    rules = with_parallel(SERVE, ParallelConfig.parse("tp2,sp"))
    assert spec(("batch", "tokens", "embed"), rules) == P("data", "model", None)


def test_tensor_parallelism_alone_leaves_the_table():
    assert with_parallel(TRAIN, ParallelConfig.parse("dp2,tp4")) == TRAIN
