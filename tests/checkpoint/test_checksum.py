import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.checkpoint.checksum import _device_checksum, checksum, checksums
from jaxscale.checkpoint.soundness import _facts_of_one_array, parameter_rms
from jaxscale.sharding.mesh import MeshSpec


def by_hand(x: np.ndarray) -> tuple[int, int]:
    """The definition, element by element, in whole numbers."""
    first = second = 0
    for i, bits in enumerate(np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}").tolist()):
        mixed = (i * 0x9E3779B1) % 2**32
        mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) % 2**32
        first += bits * (2 * i + 1)
        second += bits * ((mixed ^ (mixed >> 13)) | 1)
    return first % 2**32, second % 2**32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "bool"])
def test_equals_its_definition(dtype):
    x = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 2)) * 40).astype(dtype))
    plain = x.astype(np.uint8) if dtype == "bool" else x
    assert checksums({"x": jnp.asarray(x)})["x"] == by_hand(plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_flipped_bit_is_seen(dtype):
    x = np.asarray(jnp.asarray(np.random.default_rng(1).normal(size=(4, 3))).astype(dtype))
    width = 8 * x.dtype.itemsize
    flipped = np.stack([x] * (x.size * width)).reshape(x.size * width, -1).view(f"u{x.dtype.itemsize}").copy()
    for case in range(len(flipped)):
        flipped[case, case // width] ^= 1 << (case % width)
    cases = jnp.asarray(flipped.view(x.dtype).reshape(-1, *x.shape))
    sums = jax.jit(jax.vmap(checksum))(cases)
    assert bool((sums != checksum(jnp.asarray(x))[None, :]).all()), "both sums change with every flipped bit"


def test_exchanged_elements_are_seen():
    x = jnp.arange(6.0).reshape(2, 3)
    assert checksums({"x": x}) != checksums({"x": x[::-1]})


@pytest.mark.parametrize("mesh", ["1", "data:2", "fsdp:4,tensor:2"])
def test_does_not_depend_on_sharding(mesh):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(8, 16)), jnp.float32)
    placed = jax.device_put(x, NamedSharding(MeshSpec.parse(mesh).build(), PartitionSpec("fsdp", ("data", "tensor"))))
    assert checksums({"x": placed}) == checksums({"x": x})


def test_scalars_and_empty_arrays_and_keys():
    sums = checksums({"step": jnp.int32(7), "none": jnp.zeros((0, 3)), "key": jax.random.key(3)})
    assert sums["step"] == (7, 7)
    assert sums["none"] == (0, 0)
    assert sums["key"] != checksums({"key": jax.random.key(4)})["key"]


@pytest.mark.parametrize("mesh", ["1", "fsdp:4,tensor:2"])
def test_arrays_in_host_memory_are_summed_as_on_the_device(mesh):
    x = jnp.asarray(np.random.default_rng(3).normal(size=(8, 16)), jnp.float32)
    place = NamedSharding(MeshSpec.parse(mesh).build(), PartitionSpec("fsdp", "tensor"))
    mixed = {"there": jax.device_put(x, place.with_memory_kind("pinned_host")), "here": jax.device_put(x, place)}
    assert checksums(mixed) == dict.fromkeys(("there", "here"), checksums({"x": x})["x"])


def test_layers_of_one_shape_share_a_program():
    """Programs for all arrays of a model of many layers would compile for longer than a save takes."""
    rng = np.random.default_rng(4)
    arrays = {f"params/{index}": jnp.asarray(rng.normal(size=(3, 37)), jnp.float32) for index in range(20)}
    before = _device_checksum._cache_size(), _facts_of_one_array._cache_size()
    sums, rms = checksums(arrays), parameter_rms(arrays)
    assert (_device_checksum._cache_size(), _facts_of_one_array._cache_size()) == (before[0] + 1, before[1] + 1)
    assert all(sums[name] == by_hand(np.asarray(array)) for name, array in arrays.items())
    whole = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays.values()])
    assert rms == pytest.approx(np.sqrt(np.mean(whole**2)), rel=1e-6)


@pytest.mark.parametrize("mesh", ["1", "fsdp:4,tensor:2"])
def test_one_number_that_is_not_finite_is_found_in_any_array(mesh):
    place = NamedSharding(MeshSpec.parse(mesh).build(), PartitionSpec("fsdp", "tensor"))
    arrays = {f"params/{index}": jax.device_put(jnp.ones((8, 4)), place) for index in range(3)}
    assert parameter_rms(arrays) == 1.0
    odd = {"optimizer/0/mu/w": jax.device_put(jnp.ones((8, 4)).at[7, 3].set(jnp.inf), place)}
    assert np.isnan(parameter_rms(arrays | odd))
    assert parameter_rms({"rest/mean": arrays["params/0"]}) == 0.0  # no parameters
