"""Bytes of a device's part against the compiler, and linked dims of reshaped arrays against their elements."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.programs.dims import dim_links, local_bytes, summed_dim_pairs
from jaxscale.sharding.partition import dim_axes

SIZES = {"data": 2, "tensor": 4}


def test_bytes_of_a_part_are_those_of_the_compiler():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec = P("data", "tensor")
    x = jax.ShapeDtypeStruct((6, 8), jnp.bfloat16)
    place = NamedSharding(mesh, spec)
    compiled = jax.jit(lambda x: x * 2, in_shardings=place).lower(x).compile()
    count = local_bytes(x, dim_axes(spec, 2), SIZES)
    assert count == 3 * 2 * 2 == compiled.memory_analysis().argument_size_in_bytes


def test_what_does_not_divide_is_padded():
    assert local_bytes(jax.ShapeDtypeStruct((5, 3), jnp.int8), (("data",), ()), SIZES) == 9


def test_a_value_that_is_no_array_has_no_bytes():
    assert local_bytes(object(), (), SIZES) == 0


SHAPES = [(4, 6, 5), (24, 5), (24, 1, 5), (120,), (2, 2, 6, 5), (6, 4, 5), (4, 30), (1, 4, 6, 1, 5), (8, 15)]


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SHAPES, SHAPES)))
def test_reshaped_dims_are_linked_where_the_dims_before_them_split_the_elements_alike(old, new):
    elements = np.arange(math.prod(old))
    expected = [
        (0, dim, target)
        for (dim, size), (target, result_size) in itertools.product(enumerate(old), enumerate(new))
        if size > 1 and result_size > 1
        if (elements // math.prod(old[dim:]) == elements // math.prod(new[target:])).all()
    ]
    assert [link for link in dim_links("reshape", {}, [old], new) if old[link[1]] > 1] == expected


def test_reshaped_dims_of_size_1_are_linked_in_order():
    assert dim_links("reshape", {}, [(1, 4, 1, 1, 5)], (1, 1, 4, 1, 5)) == [(0, 0, 0), (0, 1, 2), (0, 2, 3), (0, 4, 4)]


def test_dims_of_a_product_are_linked_to_those_of_its_operands():
    eqn = jax.make_jaxpr(lambda x, y: jnp.einsum("bik,bkj->bij", x, y))(jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5)))
    (eqn,) = [eqn for eqn in eqn.eqns if eqn.primitive.name == "dot_general"]
    shapes = [variable.aval.shape for variable in eqn.invars]
    dims = dim_links("dot_general", eqn.params, shapes, eqn.outvars[0].aval.shape)
    assert dims == [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 2, 2)]
    assert summed_dim_pairs("dot_general", eqn.params) == [(2, 1)]


def test_other_operations_have_no_links_of_their_own():
    assert dim_links("add", {}, [(4,), (4,)], (4,)) is None
