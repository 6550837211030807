import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.generation.draw import filtered_logits, kind_of, settings_of
from jaxscale.generation.sampling import Sampling


def expected_support(logits, sampling):
    """The ids that NumPy keeps: top-k, then top-p of what is left, then min-p."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    probabilities = np.exp(scaled[order] - scaled[order].max())
    probabilities /= probabilities.sum()
    if sampling.top_p is not None:
        count = int(np.searchsorted(np.cumsum(probabilities), sampling.top_p)) + 1
        order, probabilities = order[:count], probabilities[:count]
    if sampling.min_p is not None:
        order = order[probabilities >= sampling.min_p * probabilities.max()]
    return set(order.tolist())


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_filters_keep_the_tokens_that_numpy_keeps(filters):
    sampling = Sampling(temperature=1.3, **filters)
    logits = np.random.default_rng(0).normal(0, 3, (5, 61)).astype(np.float32)
    is_possible = np.isfinite(filtered_logits(jnp.asarray(logits), kind_of(sampling, 61), settings_of(sampling)))
    assert [set(np.flatnonzero(row).tolist()) for row in is_possible] == [
        expected_support(row, sampling) for row in logits
    ]


def test_draws_have_the_frequencies_of_the_filtered_distribution():
    sampling = Sampling(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02)
    logits = np.random.default_rng(1).normal(0, 2, (1, 40)).astype(np.float32)
    kept_logits = filtered_logits(jnp.asarray(logits), kind_of(sampling, 40), settings_of(sampling))[0]
    support = sorted(expected_support(logits[0], sampling))
    weights = np.exp(logits[0, support] / 0.9)
    drawn_ids = np.asarray(jax.random.categorical(jax.random.key(0), kept_logits, shape=(20_000,)))
    shares = np.bincount(drawn_ids, minlength=40) / 20_000
    assert set(np.flatnonzero(shares).tolist()) <= set(support)
    np.testing.assert_allclose(shares[support], weights / weights.sum(), atol=5 * np.sqrt(0.25 / 20_000))
