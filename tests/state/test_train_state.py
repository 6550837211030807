import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.recipe.experiment import Guard
from jaxscale.state.train_state import Watch

GUARD = Guard(spike=5.0, warmup=3)


def follow(norms, losses=None):
    watch, verdicts = Watch.start(), []
    for i, norm in enumerate(norms):
        good = watch.judge(jnp.float32(losses[i] if losses else 1.0), jnp.float32(norm), GUARD)
        watch = watch.after(jnp.float32(norm), good)
        verdicts.append(bool(good))
    return verdicts, watch


def test_a_spike_is_bad_once_the_mean_is_trusted_and_leaves_it_alone():
    verdicts, watch = follow([1, 100, 1, 1, 1000, 1])
    assert verdicts == [True, True, True, True, False, True]
    assert float(watch.norm) == pytest.approx(np.mean([1, 100, 1, 1, 1]), rel=1e-6)
    assert (int(watch.good), int(watch.skipped), int(watch.in_row)) == (5, 1, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_always_bad(value):
    assert follow([1, value, value])[0] == [True, False, False]
    verdicts, watch = follow([1, 1, 1], losses=[1, value, value])
    assert verdicts == [True, False, False]
    assert (int(watch.in_row), float(watch.norm)) == (2, 1.0)
