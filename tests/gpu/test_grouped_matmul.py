"""Routed experts' kernels on a GPU against the reference, in the cases that are odd."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import Activation, Matrices, bench, grouped_matmul, mixture
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.layouts.nvfp4_pages import to_pages
from tests.numerics import assert_close

pytestmark = pytest.mark.gpu

E, D, F, X = 16, 512, 768, 4
ALL_SCALES = (0, 0x7F)  # every finite positive byte
USUAL = (0x28, 0x48)  # 0.25 .. 3.75
TOKENS = (1, 2, 3, 5, 7, 8, 9, 15, 17, 24, 31, 32, 33, 127, 128, 129, 700)
_FEW = ((1, "few_tokens"), (3, "few_tokens"), (8, "few_tokens"))
_to_pages = jax.jit(to_pages)


def _pages(rows, columns, seed, scales=USUAL, outer=0.02, codes=(0, 256)):
    """Of an odd seed, the outer scales divide."""
    rng = np.random.default_rng(seed)
    bytes_ = rng.integers(scales[0], scales[1], (E, rows, columns // 16), dtype=np.uint8)
    factors = (outer * rng.uniform(0.5, 2, E)).astype(np.float32)
    tensor = NVFP4Tensor(
        jnp.asarray(rng.integers(codes[0], codes[1], (E, rows, columns // 2), dtype=np.uint8)),
        jnp.asarray(bytes_.view(ml_dtypes.float8_e4m3fn)),
        jnp.asarray(1 / factors if seed % 2 else factors),
        divides=bool(seed % 2),
    )
    return _to_pages(tensor)


def _matrices(seed=0, **options):
    shapes = ((F, D), (F, D), (D, F))
    return Matrices(*(_pages(*shape, seed + i, **options) for i, shape in enumerate(shapes)))


def _inputs(tokens, seed=0, dtype=jnp.bfloat16, experts=None):
    rng = np.random.default_rng(seed)
    if experts is None:
        experts = np.stack([rng.choice(E, X, replace=False) for _ in range(tokens)])
    x = jnp.asarray(rng.standard_normal((tokens, D)), dtype)
    return x, jnp.asarray(experts, jnp.int32), jnp.asarray(rng.random((tokens, X)), jnp.float32)


def _run(x, matrices, experts, weights, implementation, activation=None):
    run = jax.jit(mixture, static_argnames=("activation", "implementation"))
    activation = activation or Activation()
    return run(x, matrices, experts, weights, activation=activation, implementation=implementation)


def _assert_same(inputs, matrices, activation=None):
    x, experts, weights = inputs
    exact = x.astype(jnp.float32)
    expected = _run(exact, matrices, experts, weights, "reference", activation)
    for implementation in ("mosaic", "few_tokens")[: 2 if len(x) <= 8 else 1]:
        found = _run(x, matrices, experts, weights, implementation, activation)
        assert found.dtype == x.dtype
        assert_close(np.asarray(found, np.float32), np.asarray(expected), "bf16")


@pytest.mark.parametrize("tokens", TOKENS)
def test_any_number_of_tokens(tokens):
    _assert_same(_inputs(tokens, tokens), _matrices())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens", [2, 40])
def test_both_dtypes_of_activations(dtype, tokens):
    _assert_same(_inputs(tokens, 1, dtype), _matrices(1))


@pytest.mark.parametrize("tokens", [1, 33, 129])
@pytest.mark.parametrize("experts", [(5, 6, 7, 8), (0, 0, 0, 0), (15, 0, 15, 0)])
def test_all_tokens_to_the_same_experts(tokens, experts):
    _assert_same(_inputs(tokens, 2, experts=np.tile(experts, (tokens, 1))), _matrices(2))


@pytest.mark.parametrize("tokens", [4, 130])
def test_experts_of_other_devices_add_nothing(tokens):
    rng = np.random.default_rng(3)
    experts = rng.integers(-E, 2 * E, (tokens, X))
    experts[0] = [-1, E, 99, -7]  # none is here
    x, experts, weights = _inputs(tokens, 3, experts=experts)
    _assert_same((x, experts, weights), _matrices(3))
    found = _run(x, _matrices(3), experts, weights, "mosaic")
    assert not np.asarray(found[0], np.float32).any()


def test_tokens_may_all_be_other_devices():
    inputs = _inputs(20, 4, experts=np.full((20, X), E))
    x, experts, weights = inputs
    assert not np.asarray(_run(x, _matrices(), experts, weights, "mosaic"), np.float32).any()


@pytest.mark.parametrize(
    "options",
    [
        {"scales": ALL_SCALES, "outer": 1e-3},
        {"scales": (0, 1)},  # zero blocks
        {"scales": (0, 16), "outer": 0.5},  # subnormal ones
        {"scales": (0x7E, 0x7F), "codes": (0x77, 0x78), "outer": 1e-4},  # 6 * 448
        {"codes": (0x11, 0x12), "outer": 0.05},  # 0.5, a subnormal of both halves
    ],
)
@pytest.mark.parametrize("tokens", [3, 50])
def test_odd_scales_and_codes(options, tokens):
    if options.get("scales") == (0, 1):
        x, experts, weights = _inputs(tokens, 5)
        found = _run(x, _matrices(5, **options), experts, weights, "mosaic")
        assert not np.asarray(found, np.float32).any()
    else:
        _assert_same(_inputs(tokens, 5), _matrices(5, **options))


@pytest.mark.parametrize("tokens", [6, 60])
def test_gates_beyond_the_clamp(tokens):
    _assert_same(_inputs(tokens, 6), _matrices(6, outer=2.0))
    other = Activation(alpha=1.0, limit=2.5, beta=0.5)
    _assert_same(_inputs(tokens, 6), _matrices(6), other)


def test_a_token_is_computed_alike_in_every_batch():
    x, experts, weights = _inputs(200, 7)
    matrices = _matrices(7)
    whole = np.asarray(_run(x, matrices, experts, weights, "mosaic"), np.float32)
    for tokens, how in ((1, "mosaic"), (8, "mosaic"), (50, "mosaic"), *_FEW):
        part = _run(x[:tokens], matrices, experts[:tokens], weights[:tokens], how)
        assert np.array_equal(np.asarray(part, np.float32), whole[:tokens])


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
def test_few_tokens_meet_the_shared_expert_in_the_same_launches(tokens):
    """At full width, and all of it: the shared expert's units share a ring with the pages."""
    D, F, E = 6144, 3072, 40
    rng = np.random.default_rng(tokens)
    up, down = (bench._pages(i, E, *shape) for i, shape in enumerate(((F, D), (D, F))))
    routed, shared = Matrices(up, up, down), bench._shared(D, F)[0]
    experts = np.stack([rng.choice(E, X, replace=False) for _ in range(tokens)])
    x = jnp.asarray(rng.standard_normal((tokens, D)) * 0.05, jnp.bfloat16)
    weights = jnp.asarray(rng.random((tokens, X)), jnp.float32)

    def run(implementation, routed, x, experts):
        given = x, routed, experts, weights, Activation(), shared
        return jax.jit(partial(mixture, implementation=implementation), static_argnums=4)(*given)

    found = np.asarray(run("few_tokens", routed, x, jnp.asarray(experts, jnp.int32)), np.float32)
    met = np.unique(experts)
    some = jax.tree.map(lambda leaf: leaf[met], routed)
    renamed = jnp.asarray(np.searchsorted(met, experts), jnp.int32)
    apart = np.asarray(run("mosaic", some, x, renamed), np.float32)
    expected = run("reference", some, x.astype(jnp.float32), renamed)
    print(f"{tokens} tokens: {(found != apart).mean():.2%} of bits differ from those of two steps")
    assert_close(found, np.asarray(expected), "bf16")
    nobody = jnp.full((tokens, X), -1)
    alone, expected = run("few_tokens", routed, x, nobody), run("reference", some, x, nobody)
    assert_close(np.asarray(alone, np.float32), np.asarray(expected, np.float32), "bf16")


@pytest.mark.parametrize("rows", [1, 37, 600])
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_one_matrix_an_expert(rows, out_dtype):
    rng = np.random.default_rng(rows)
    sizes = jnp.asarray(rng.multinomial(rows, rng.dirichlet(np.ones(E))), jnp.int32)
    x = jnp.asarray(rng.standard_normal((rows, F)), jnp.bfloat16)
    weights = _pages(D, F, 8)
    run = jax.jit(grouped_matmul, static_argnames=("out_dtype", "implementation"))
    options = {"out_dtype": out_dtype}
    found = run(x, weights, sizes, implementation="mosaic", **options)
    expected = run(x.astype(jnp.float32), weights, sizes, implementation="reference", **options)
    kind = "f32" if out_dtype == jnp.float32 else "bf16"
    assert_close(np.asarray(found, np.float32), np.asarray(expected, np.float32), kind)


def test_gradients_are_the_references():
    x, experts, weights = _inputs(12, 9)
    matrices = _matrices(9)

    def loss(x, weights, implementation):
        y = mixture(x, matrices, experts, weights, Activation(), implementation=implementation)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    found = jax.jit(jax.grad(lambda x, w: loss(x, w, "mosaic"), (0, 1)))(x, weights)
    expected = jax.jit(jax.grad(lambda x, w: loss(x, w, "reference"), (0, 1)))(x, weights)
    for one, other in zip(found, expected, strict=True):
        assert_close(np.asarray(one, np.float32), np.asarray(other, np.float32), "nvfp4")
