import jax
import numpy as np
import pytest

import jaxscale
from jaxscale.errors import UserError
from jaxscale.training import host_memory, loop


def experiment():
    tokens = np.zeros((16, 8), np.int32)
    model = jaxscale.models.Decoder(vocab=16, context=8, layers=1, embed=8, heads=1)
    data = {"tokens": tokens, "targets": tokens}
    return jaxscale.Experiment("tiny", model, data, steps=1, batch=8, samples=jaxscale.Samples(prompts=()))


def test_the_bytes_of_a_state_are_those_of_its_shards():
    step = jaxscale.build(experiment(), jaxscale.Plan(mesh="fsdp:2", zero=1))
    shards = [shard for leaf in jax.tree.leaves(step.init()) for shard in leaf.addressable_shards]
    assert host_memory.state_bytes(step) == sum(shard.data.nbytes for shard in shards)


def test_a_state_larger_than_the_host_is_refused_before_it_is_created(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "host_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"parameters and optimizer state take .* may use 1000 B"):
        loop.train(experiment(), jaxscale.Plan(mesh="1"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_state_near_the_memory_is_warned_of():
    lines = []
    host_memory.check_host_holds(600, lines.append, 1000)
    assert not lines
    host_memory.check_host_holds(800, lines.append, 1000)
    assert lines == [
        "warning: parameters and optimizer state take 800 B of the 1000 B that this host's processes may "
        "use; a step needs more"
    ]
