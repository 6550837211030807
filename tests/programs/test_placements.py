"""Placements carried through a program agree with what XLA's partitioner makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.programs.dims import placement_of
from jaxscale.programs.flat import flatten
from jaxscale.programs.placements import place
from jaxscale.programs.tiles import padding_factor, prescribed_tiles

SIZES = {"fsdp": 2, "tensor": 4}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor"))


def placed(mesh, fn, *given):
    """Placement of the only result of `fn`, and what XLA chooses for it."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in given]
    program = flatten(jax.make_jaxpr(fn)(*args))
    placements = place(program, [placement_of(arg.sharding, len(arg.shape)) for arg in args], SIZES)
    compiled = jax.jit(fn).lower(*args).compile()
    made = program.avals[program.outputs[0]]
    theirs = compiled.output_shardings.shard_shape(made.shape)
    ours = tuple(
        -(-size // placements.part_count(axes))
        for size, axes in zip(made.shape, placements.by_value[program.outputs[0]], strict=True)
    )
    return ours, theirs


CASES = {
    "product": (lambda x, w: x @ w, ((8, 16), P("fsdp")), ((16, 32), P(None, "tensor"))),
    "contracted": (lambda x, w: x @ w, ((8, 16), P("fsdp", "tensor")), ((16, 32), P("tensor"))),
    "constant operand": (lambda x: x @ np.ones((16, 32), np.float32), ((8, 16), P("fsdp"))),
    "elementwise": (lambda x, y: jnp.tanh(x) * y, ((8, 16), P("fsdp")), ((8, 16), P("fsdp"))),
    "heads": (lambda x: x.reshape(8, 4, 8).transpose(1, 0, 2), ((8, 32), P("fsdp", "tensor"))),
    "merged": (lambda x: x.reshape(8, 32), ((8, 4, 8), P("fsdp", "tensor"))),
    "sum": (lambda x: x.sum(1), ((8, 16, 4), P("fsdp", None, "tensor"))),
    "written slice": (
        lambda x, w: jax.lax.dynamic_update_slice(jnp.zeros((3, 8, 32)), (x @ w)[None], (1, 0, 0)),
        ((8, 16), P("fsdp")),
        ((16, 32), P(None, "tensor")),
    ),
    "scan": (
        lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0],
        ((8, 16), P("fsdp")),
        ((3, 16, 16), P()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_xla_does(mesh, name):
    fn, *given = CASES[name]
    ours, theirs = placed(mesh, fn, *given)
    assert ours == theirs


def test_a_weight_shard_is_gathered_for_rows_on_the_same_axis(mesh):
    x, w = jnp.ones((64, 16)), jnp.ones((16, 32))
    program = flatten(jax.make_jaxpr(lambda x, w: x @ w)(x, w))
    placements = place(program, [(("fsdp",), ()), (("fsdp",), ("tensor",))], SIZES)
    assert placements.by_value[program.outputs[0]] == (("fsdp",), ("tensor",))
    assert placements.gathered_bytes == {0: 16 * 32 * 4 // 4}


def test_a_gradient_over_rows_is_summed():
    x, dy = jnp.ones((8, 16)), jnp.ones((8, 32))
    program = flatten(jax.make_jaxpr(lambda x, dy: x.T @ dy)(x, dy))
    placements = place(program, [(("fsdp",), ()), (("fsdp",), ())], SIZES)
    assert len(placements.summed_products) == 1
    assert placements.by_value[program.outputs[0]] == ((), ())


def test_a_constraint_reaches_back_to_what_it_places(mesh):
    sharding = NamedSharding(mesh, P("fsdp"))

    def fn(x, dy):
        return jax.lax.with_sharding_constraint((x.T @ dy) * 2.0, sharding)

    program = flatten(jax.make_jaxpr(fn)(jnp.ones((8, 16)), jnp.ones((8, 32))))
    placements = place(program, [(("fsdp",), ()), (("fsdp",), ())], SIZES)
    product = next(operation for operation in program.operations if operation.kind == "dot_general")
    assert placements.by_value[product.outputs[0]] == (("fsdp",), ())


def test_sums_of_gradients_are_sharded_like_the_state_that_they_update(mesh):
    whole, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))

    def fn(param, xs, dys):
        def add(total, rows):
            gradient = jax.lax.with_sharding_constraint(rows[0].T @ rows[1], whole)  # ZeRO 1
            return total + gradient, None

        zeros = jax.lax.with_sharding_constraint(jnp.zeros((24, 32)), whole)
        return param + 0.1 * jax.lax.scan(add, zeros, (xs, dys))[0]

    shapes_and_shardings = [
        ((24, 32), sharded), ((3, 8, 24), NamedSharding(mesh, P(None, "fsdp"))),
        ((3, 8, 32), NamedSharding(mesh, P(None, "fsdp"))),
    ]  # fmt: skip
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s) for shape, s in shapes_and_shardings]
    program = flatten(jax.make_jaxpr(fn)(*args))
    placements = place(program, [placement_of(arg.sharding, len(arg.shape)) for arg in args], SIZES)
    (index,) = placements.loop_placements
    (total,) = program.operations[index].outputs
    body_placements = placements.loop_placements[index]
    body = body_placements.program
    gradient = next(op.outputs[0] for op in body.operations if op.kind == "sharding_constraint")
    assert placements.by_value[total] == body_placements.by_value[body.inputs[0]] == (("fsdp",), ())
    assert body_placements.by_value[gradient] == ((), ())
    loop_lines = [line for line in jax.jit(fn).lower(*args).compile().as_text().splitlines() if " while(" in line]
    assert "f32[12,32]" in loop_lines[0]
    assert "f32[24,32]" not in loop_lines[0]


def test_the_state_of_a_while_loop_is_placed_too():
    def fn(param, step, stop):
        total = jax.lax.while_loop(lambda s: s[0] < stop, lambda s: (s[0] + 1, s[1] + step), (0, jnp.zeros((24, 32))))[
            1
        ]
        return param + total

    args = [jnp.zeros((24, 32)), jnp.zeros((24, 32)), 3]
    program = flatten(jax.make_jaxpr(fn)(*args))
    placements = place(program, [(("fsdp",), ()), ((), ()), ()], SIZES)
    (index,) = placements.loop_placements
    assert placements.by_value[program.operations[index].outputs[1]] == (("fsdp",), ())


def test_the_initial_state_of_a_loop_is_placed_like_the_state_in_its_body():
    def fn(xs):
        zeros = jnp.zeros((24, 32))
        return jax.lax.scan(lambda total, x: (total + x, None), zeros, xs)[0]

    program = flatten(jax.make_jaxpr(fn)(jnp.zeros((5, 24, 32))))
    placements = place(program, [((), ("fsdp",), ())], SIZES)
    (zeros,) = [operation.outputs[0] for operation in program.operations if operation.kind == "broadcast_in_dim"]
    assert placements.by_value[zeros] == (("fsdp",), ())


def test_an_array_is_placed_where_a_region_over_manual_axes_reads_it():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("replica", "tensor"))

    def fn(x, dy):
        scale = jax.shard_map(lambda part: part * 2.0, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"),
                              axis_names={"replica"})  # fmt: skip
        return scale(x.T @ dy)

    program = flatten(jax.make_jaxpr(fn)(jnp.ones((8, 16)), jnp.ones((8, 32))))
    placements = place(program, [((), ()), ((), ())], {"replica": 4, "tensor": 2})
    product = next(operation for operation in program.operations if operation.kind == "dot_general")
    assert placements.by_value[product.outputs[0]] == (("replica",), ())


def test_a_sum_over_branches_is_placed_like_the_array_that_it_leaves_a_region_for():
    """A table's gradient: a branch of each trip adds rows, and the sum over devices is a shard of a sharded array."""

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("pipe", "tensor"))

    def table_gradient(rows, indices):
        def add_rows(total, trip):
            new_rows = jax.lax.cond(
                trip > 0, lambda: jnp.zeros((16, 8)).at[indices].add(rows), lambda: jnp.zeros((16, 8))
            )
            return total + new_rows, None

        total = jax.lax.scan(add_rows, jnp.zeros((16, 8)), jnp.arange(3))[0]
        return jax.lax.psum_scatter(total, "pipe", scatter_dimension=0, tiled=True)

    def step(rows, indices):
        region = jax.shard_map(
            table_gradient, mesh=mesh, in_specs=P(), out_specs=P("pipe"), axis_names={"pipe"}, check_vma=False
        )
        table = region(rows, indices)
        return jax.lax.with_sharding_constraint(table, NamedSharding(mesh, P(("pipe", "tensor"))))

    program = flatten(jax.make_jaxpr(step)(jnp.ones((4, 8)), jnp.arange(4)))
    placements = place(program, [((), ()), ((),)], dict(mesh.shape), tiles=prescribed_tiles(program))
    (loop,) = placements.loop_placements.values()
    (branches,) = loop.branch_placements.values()
    scattered_values = [
        (placed, operation.outputs[0])
        for placed in branches
        for operation in placed.program.operations
        if operation.kind.startswith("scatter")
    ]
    assert [placed.by_value[value] for placed, value in scattered_values] == [(("tensor",), ())]
    assert loop.by_value[loop.program.outputs[0]] == (("tensor",), ())
    (untiled_loop,) = place(program, [((), ()), ((),)], dict(mesh.shape)).loop_placements.values()
    assert untiled_loop.by_value[untiled_loop.program.outputs[0]] == ((), ())  # as XLA for GPUs leaves it


def test_branches_that_are_placed_again_read_their_operands_where_readers_put_them():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("pipe", "tensor"))
    weight = jnp.ones((8, 8))

    def step(x, index):
        def part(x, index):
            y = jnp.sin(x)
            branches = (lambda a: (jnp.tanh(a @ weight) @ weight, a * 2), lambda a: (a, a))
            z, doubled = jax.lax.cond(index[0] > 0, *branches, y)
            return jax.lax.psum(y, "pipe"), jax.lax.psum(doubled, "pipe"), z[None]

        run = jax.shard_map(
            part, mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P(), P("pipe")), axis_names={"pipe"}, check_vma=False
        )
        y, doubled, z = run(x, index)
        rows, columns = (NamedSharding(mesh, spec) for spec in (P("tensor"), P(None, "tensor")))
        return jax.lax.with_sharding_constraint(y, rows), jax.lax.with_sharding_constraint(doubled, columns), z

    program = flatten(jax.make_jaxpr(step)(jnp.ones((16, 8)), jnp.ones(1, jnp.int32)))
    placements = place(program, [((), ()), ((),)], dict(mesh.shape), tiles=prescribed_tiles(program))
    (branches,) = placements.branch_placements.values()
    products = [(b, op.outputs[0]) for b in branches for op in b.program.operations if op.kind == "dot_general"]
    assert [branch.by_value[value] for branch, value in products] == [(("tensor",), ())] * 2


@pytest.mark.parametrize(("is_tiled", "shape"), [(True, (8, 16)), (False, (2, 16))])
def test_a_scattered_sum_keeps_the_axes_of_its_operand(is_tiled, shape):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("pipe", "tensor"))

    def fn(x):
        return jax.shard_map(
            lambda part: jax.lax.psum_scatter(part, "pipe", tiled=is_tiled), mesh=mesh, in_specs=P(),
            out_specs=P("pipe"), axis_names={"pipe"}, check_vma=False,
        )(x)  # fmt: skip

    program = flatten(jax.make_jaxpr(fn)(jnp.ones(shape)))
    placements = place(program, [((), ("tensor",))], dict(mesh.shape))
    (scatter,) = (operation for operation in program.operations if operation.kind == "reduce_scatter")
    assert placements.by_value[scatter.outputs[0]] == ((), ("tensor",))[not is_tiled :]


def test_a_mask_that_a_loop_stacks_is_split_like_the_rows_that_it_masks():
    def fn(x):
        masks = jax.lax.scan(lambda c, i: (c, jnp.broadcast_to(jnp.arange(6) < i, (8, 6))), None, jnp.arange(3))[1]
        return jax.lax.scan(lambda c, mask: (jnp.where(mask, c, 0.0), None), x, masks, reverse=True)[0]

    program = flatten(jax.make_jaxpr(fn)(jnp.ones((8, 6))))
    placements = place(program, [(("fsdp",), ())], SIZES)
    (masks,) = (value for value, aval in program.avals.items() if getattr(aval, "shape", ()) == (3, 8, 6))
    assert placements.by_value[masks] == ((), ("fsdp",), ())


def test_a_scattered_sum_without_the_scattered_dim_leaves_its_operand_unchanged():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("pipe", "tensor"))

    def fn(x):
        scatter = jax.shard_map(
            lambda part: jax.lax.psum_scatter(part, "pipe"), mesh=mesh, in_specs=P(), out_specs=P("pipe"),
            axis_names={"pipe"}, check_vma=False,
        )  # fmt: skip
        return jax.lax.with_sharding_constraint(scatter(x @ x), NamedSharding(mesh, P(("pipe", "tensor"))))

    program = flatten(jax.make_jaxpr(fn)(jnp.ones((2, 16, 8, 8))))
    placements = place(program, [((),) * 4], dict(mesh.shape), tiles=prescribed_tiles(program))
    product = next(operation for operation in program.operations if operation.kind == "dot_general")
    assert placements.by_value[product.outputs[0]] == ((),) * 4


def test_a_region_keeps_the_axes_that_are_not_manual():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("sequence", "fsdp"))

    def fn(x):
        specs = {"in_specs": P(None, "sequence"), "out_specs": (P("sequence"), P("sequence"))}
        run = jax.shard_map(lambda part: (part.T, jnp.ones(part.shape[1])), mesh=mesh, axis_names={"sequence"}, **specs)
        return run(x)

    program = flatten(jax.make_jaxpr(fn)(jnp.ones((8, 16))))
    for axes in (("fsdp",), ()):  # along the batch
        placements = place(program, [(axes, ("sequence",))], {"sequence": 4, "fsdp": 2})
        transposed, ones = [placements.by_value[value] for value in program.outputs]
        assert (transposed, ones) == ((("sequence",), axes), (("sequence",),))


@pytest.mark.parametrize(("shape", "factor"), [((512, 128), 1.0), ((512, 257, 64), 1.0), ((1024, 100), 1.04)])
def test_padding_takes_the_best_layout(shape, factor):
    assert padding_factor(shape) == factor


def test_padding_of_odd_sides():
    assert padding_factor((257, 257)) == pytest.approx(384 / 257 * 264 / 257)


def test_a_gradient_is_placed_through_a_reshape_like_the_sharded_parameter():
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    sharding = NamedSharding(mesh, P(None, "fsdp"))

    def fn(x, dy):
        stacked = jnp.einsum("abti,abtj->abij", x, dy)
        return jax.lax.with_sharding_constraint(stacked.reshape(6, 24, 32), sharding)

    args = [jax.ShapeDtypeStruct((3, 2, 8, width), jnp.float32) for width in (24, 32)]
    program = flatten(jax.make_jaxpr(fn)(*args))
    placements = place(program, [((),) * 4] * 2, SIZES)
    product = next(operation for operation in program.operations if operation.kind == "dot_general")
    assert placements.by_value[product.outputs[0]] == ((), (), ("fsdp",), ())
