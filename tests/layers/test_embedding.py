import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.layers.embedding import Embedding, PositionTable


def test_padding_adds_zero_rows_and_leaves_the_random_ones():
    plain, padded = (Embedding(5, 3, vocab_multiple=n, rngs=nnx.Rngs(7)) for n in (1, 4))
    assert plain.weight.shape == (5, 3)
    assert padded.weight.shape == (8, 3)
    np.testing.assert_array_equal(padded.weight[:5], plain.weight[...])
    np.testing.assert_array_equal(padded.weight[5:], np.zeros((3, 3)))
    assert padded.weight.out_sharding == ("vocab", "embed")


def test_lookup_casts_values_and_sums_gradients_in_the_type_of_the_table():
    embedding = Embedding(4, 2, rngs=nnx.Rngs(0))
    tokens = jnp.array([[3, 1, 3]])
    rows = embedding.lookup(tokens, "bfloat16")
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows[0], embedding.weight[...][np.array([3, 1, 3])].astype(jnp.bfloat16))
    many = jnp.full((1, 1000), 3)
    gradient = jax.grad(lambda m: m.lookup(many, jnp.bfloat16).astype(jnp.float32).sum())(embedding)
    # bfloat16 cannot count to 1000 by ones
    np.testing.assert_array_equal(gradient.weight[...], [[0, 0], [0, 0], [0, 0], [1000, 1000]])


def test_position_table():
    table = PositionTable(4, 2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(table.lookup(jnp.array([[2, 0]]))[0], table.weight[...][np.array([2, 0])])
    assert table.weight.out_sharding == ("position", "embed")


def test_gradients_of_a_bfloat16_table_add_up_in_float32():
    embedding = Embedding(4, 2, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 4096), jnp.int32)

    def total(weight):
        graph, _ = nnx.split(embedding)
        return nnx.merge(graph, {"weight": weight}).lookup(tokens).astype(jnp.float32).sum()

    gradient = jax.grad(total)(embedding.weight[...].astype(jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient.astype(jnp.float32), [[4096.0, 4096.0]] + [[0.0, 0.0]] * 3)


def test_tokens_of_8_bits_are_looked_up_in_a_sharded_table():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    embedding = Embedding(300, 8, rngs=nnx.Rngs(0))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tensor"))
    embedding.weight[...] = jax.device_put(embedding.weight[...], sharding)
    tokens = jnp.array([[0, 200, 255]])
    look_up = jax.jit(lambda tokens: embedding.lookup(tokens))
    np.testing.assert_array_equal(look_up(tokens.astype(jnp.uint8)), look_up(tokens))
