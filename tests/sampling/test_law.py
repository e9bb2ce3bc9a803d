"""Every option against the float64 reference: the distribution, draws from it, and the order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

from minimax_jax.sampling import SamplingParams, processed, sample
from tests.sampling import reference
from tests.sampling.reference import ORDER, Case, batch, found, law

V = 24
LOGITS = np.random.default_rng(1).normal(size=V) * 1.5
PROMPT, OUTPUT = (1, 2, 3, 3, 9), (4, 5, 4, 4, 6, 5)
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "negative frequency": {"frequency_penalty": -0.5},
    "logit_bias": {"logit_bias": {7: 2.0, 8: -100.0, 0: 0.5}},
    "allowed": {"allowed_token_ids": (2, 3, 5, 7, 11, 13, 17, 19, 23)},
    "bad words": {"bad_words": ((0,), (6, 5, 8), (5, 10), (3, 5), (4, 6, 5, 12), (1, 4, 2))},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": (0, 11, 13)},
    "min_tokens reached": {"min_tokens": 6, "stop_token_ids": (0, 11, 13)},
    "all": {
        "temperature": 0.8,
        "min_p": 0.02,
        "top_k": 12,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 2.0, 4: 3.0},
        "allowed_token_ids": tuple(range(20)),
        "bad_words": ((6, 5, 8), (5, 10)),
        "min_tokens": 7,
        "stop_token_ids": (0, 11),
    },
}
GRAMMAR = tuple(token % 3 != 1 for token in range(V))


def case(name: str, **more) -> Case:
    params = SamplingParams(**OPTIONS[name], **more)
    return Case(logits=LOGITS, params=params, prompt=PROMPT, output=OUTPUT)


def masked_case(name: str) -> Case:
    plain = case(name)
    return Case(logits=LOGITS, params=plain.params, prompt=PROMPT, output=OUTPUT, grammar=GRAMMAR)


@pytest.fixture(scope="module")
def together() -> np.ndarray:
    """All options in one batch, without and with a grammar's mask."""
    return found([make(name) for make in (case, masked_case) for name in OPTIONS])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_mixed_batch_has_each_rows_law(name, together):
    row = list(OPTIONS).index(name)
    np.testing.assert_allclose(together[row], law(case(name)), atol=2e-6)
    row += len(OPTIONS)
    np.testing.assert_allclose(together[row], law(masked_case(name)), atol=2e-6)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "min_tokens reached"])
def test_every_option_changes_the_law(name):
    """F119: nothing is accepted and then ignored."""
    change = np.abs(law(case(name)) - law(case("plain"))).max()
    assert (change > 1e-3) == (name != "plain"), change


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_law_of_each_option(name):
    count = 20_000
    one = case(name, seed=7)
    many = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), batch([one]))
    tokens = np.asarray(_drawn(*many, jnp.arange(count)))
    observed, expected = np.bincount(tokens, minlength=V), count * law(one)
    assert not observed[expected == 0].any(), "a forbidden token was drawn"
    common = expected >= 5
    rest = expected[~common].sum()
    cells = [*((observed - expected) ** 2)[common] / expected[common]]
    if rest >= 5:
        cells.append((observed[~common].sum() - rest) ** 2 / rest)
    assert float(chi2.sf(sum(cells), len(cells) - 1)) > 1e-4


@jax.jit
def _drawn(logits, state, positions, history, number):
    """One token a row; each row as if it were at another position, which makes its own number."""
    done = processed(logits, state, positions, history)
    return sample(done, state, positions + number)


SWAPS = [
    ("bias", "repetition"),
    ("repetition", "frequency_and_presence"),
    ("frequency_and_presence", "temperature"),
    ("temperature", "min_p"),
    ("min_p", "top_p"),
    ("top_k", "top_p"),
    ("forbidden", "min_p"),
    ("grammar", "top_p"),
]


def swapped(first: str, second: str) -> list[reference.Stage]:
    names = {first: second, second: first}
    stages = {stage.__name__: stage for stage in ORDER}
    return [stages[names.get(stage.__name__, stage.__name__)] for stage in ORDER]


def order_cases() -> list[Case]:
    """Rows with everything on, in which any swap shows."""
    rng, cases = np.random.default_rng(3), []
    for _ in range(40):
        params = SamplingParams(
            temperature=float(rng.uniform(0.5, 2)),
            min_p=float(rng.uniform(0.02, 0.2)),
            top_k=int(rng.integers(4, 12)),
            top_p=float(rng.uniform(0.5, 0.9)),
            repetition_penalty=float(rng.uniform(1.2, 2)),
            presence_penalty=float(rng.uniform(-1, 1)),
            frequency_penalty=float(rng.uniform(-1, 1)),
            logit_bias={int(t): float(rng.uniform(-3, 3)) for t in rng.permutation(V)[:6]},
            allowed_token_ids=tuple(map(int, rng.permutation(V)[:18])),
        )
        prompt, output = (tuple(map(int, rng.integers(0, V, n))) for n in (6, 6))
        grammar = tuple(rng.random(V) < 0.8)
        cases.append(
            Case(
                logits=rng.normal(size=V) * 2,
                params=params,
                prompt=prompt,
                output=output,
                grammar=grammar,
            )
        )
    return cases


def test_processors_run_in_vllms_order():
    cases = order_cases()
    np.testing.assert_allclose(found(cases), [law(one) for one in cases], atol=5e-6)


@pytest.mark.parametrize(("first", "second"), SWAPS)
def test_two_processors_in_the_other_order_are_noticed(first, second):
    cases, order = order_cases(), swapped(first, second)
    other = np.stack([law(one, order) for one in cases])
    assert np.abs(found(cases) - other).max() > 1e-2


def test_at_temperature_0_the_best_processed_token_is_taken():
    for name in ("all", "logit_bias", "repetition", "bad words"):
        params = SamplingParams(**{**OPTIONS[name], "temperature": 0.0})
        one = Case(logits=LOGITS, params=params, prompt=PROMPT, output=OUTPUT)
        logits, state, positions, history = batch([one])
        token = sample(processed(logits, state, positions, history), state, positions)
        assert int(token[0]) == int(np.argmax(law(one)))
