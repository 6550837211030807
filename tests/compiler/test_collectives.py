import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxscale.compiler.collectives import Collective, collectives, groups_of, parse_groups
from jaxscale.compiler.hlo_program import HloProgram
from jaxscale.compiler.hlo_source import Sources
from jaxscale.compiler.live_names import ValueNames


def make_mesh(sizes: dict[str, int], order=None) -> Mesh:
    devices = np.array(jax.devices())[: np.prod(list(sizes.values()))]
    devices = devices if order is None else devices[list(order)]
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def compiled(fn, mesh: Mesh, arguments, out_specs=None) -> str:
    """Text of `fn` compiled for (shape, spec) arguments."""
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in arguments
    ]
    options = {}
    if out_specs is not None:

        def is_spec(x):
            return isinstance(x, P)

        options["out_shardings"] = jax.tree.map(lambda s: NamedSharding(mesh, s), out_specs, is_leaf=is_spec)
    return jax.jit(fn, **options).lower(*structs).compile().as_text()


def summary(found: list[Collective]) -> collections.Counter:
    total = collections.Counter()
    for one in found:
        total[one.kind, one.axes, one.bytes] += one.count
    return total


GRAD = jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum())


@pytest.mark.parametrize("order", [None, (7, 3, 1, 5, 0, 2, 4, 6)], ids=["in order", "shuffled"])
def test_data_parallel_gradient_is_one_all_reduce(order):
    mesh = make_mesh({"data": 8}, order)
    text = compiled(GRAD, mesh, [((16, 32), P()), ((64, 16), P("data"))], P())
    assert summary(collectives(text, mesh)) == {("all-reduce", ("data",), 16 * 32 * 4): 1}


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 4}, {"fsdp": 4, "data": 2}, {"data": 4, "fsdp": 2}])
def test_gradients_summed_over_one_axis_of_two(sizes):
    mesh = make_mesh(sizes)
    for axis in sizes:
        text = compiled(GRAD, mesh, [((16, 32), P()), ((64, 16), P(axis))], P())
        assert summary(collectives(text, mesh)) == {("all-reduce", (axis,), 16 * 32 * 4): 1}


@pytest.mark.parametrize(
    "axes", [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("c", "a"), ("a", "b", "c")]
)
def test_every_subset_of_three_axes_is_found(axes):
    mesh = make_mesh({"a": 2, "b": 2, "c": 2}, (6, 4, 0, 2, 7, 5, 1, 3))
    text = compiled(lambda x: x.sum(0), mesh, [((64, 16), P(axes))], P())
    assert summary(collectives(text, mesh)) == {("all-reduce", tuple(sorted(axes)), 16 * 4): 1}


def test_sharded_gradient_is_a_reduce_scatter_though_cpu_has_none():
    mesh = make_mesh({"data": 2, "fsdp": 4})
    arguments = [((16, 32), P()), ((64, 16), P("fsdp"))]
    text = compiled(GRAD, mesh, arguments, P("fsdp"))
    assert "reduce-scatter" not in text
    assert summary(collectives(text, mesh)) == {("reduce-scatter", ("fsdp",), 16 * 32 * 4): 1}


def test_reduce_scatter_through_a_cast():
    mesh = make_mesh({"fsdp": 8})
    text = compiled(
        lambda w, x: GRAD(w, x).astype(jnp.bfloat16), mesh, [((16, 32), P()), ((64, 16), P("fsdp"))], P("fsdp")
    )
    assert summary(collectives(text, mesh)) == {("reduce-scatter", ("fsdp",), 16 * 32 * 4): 1}


def test_gathered_weights_in_a_scan_count_once_a_layer():
    mesh, layers = make_mesh({"fsdp": 8}), 5

    def loss(w, x):
        return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2).sum()

    text = compiled(jax.grad(loss), mesh, [((layers, 32, 32), P(None, "fsdp")), ((64, 32), P("fsdp"))], P(None, "fsdp"))
    found = collectives(text, mesh)
    whole = 32 * 32 * 4
    assert summary(found) == {
        ("all-gather", ("fsdp",), whole): 2 * layers,  # forward and backward
        ("reduce-scatter", ("fsdp",), whole): layers,
    }
    assert all(one.in_loop and one.trips_known for one in found)


def test_bytes_of_unrolled_layers_add_up_however_the_compiler_combines_them():
    mesh, layers, whole = make_mesh({"data": 2, "fsdp": 4}), 6, 32 * 32 * 4

    def loss(x, *weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    arguments = [((64, 32), P(("data", "fsdp"))), *[((32, 32), P("fsdp"))] * layers]
    gradient = jax.grad(loss, argnums=tuple(range(1, layers + 1)))
    total = collections.Counter()
    for one in collectives(compiled(gradient, mesh, arguments, (P("fsdp"),) * layers), mesh):
        total[one.kind, one.axes] += one.bytes * one.count
    assert total["reduce-scatter", ("fsdp",)] == layers * whole
    assert total["all-reduce", ("data",)] == layers * whole // 4
    assert total["all-gather", ("fsdp",)] >= layers * whole


def test_tensor_parallel_layer_is_one_all_reduce_each_way():
    mesh = make_mesh({"data": 2, "tensor": 4})

    def forward(up, down, x):
        return jnp.tanh(x @ up) @ down

    arguments = [((16, 32), P(None, "tensor")), ((32, 16), P("tensor")), ((8, 16), P("data"))]
    text = compiled(forward, mesh, arguments, P("data"))
    assert summary(collectives(text, mesh)) == {("all-reduce", ("tensor",), 8 // 2 * 16 * 4): 1}


def test_manual_collectives_of_each_kind():
    mesh = make_mesh({"data": 2, "fsdp": 4}, (7, 3, 1, 5, 0, 2, 4, 6))
    shard = 64 // 8 * 16 * 4
    expected = {
        "all-to-all": (("data",), shard),
        "reduce-scatter": (("fsdp",), shard),
        "all-gather": (("data", "fsdp"), 8 * shard),
        "collective-permute": (("fsdp",), shard),
    }
    bodies = {
        "all-to-all": lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
        "reduce-scatter": lambda x: lax.psum_scatter(x, "fsdp", tiled=True),
        "all-gather": lambda x: lax.all_gather(x, ("data", "fsdp"), tiled=True),
        "collective-permute": lambda x: lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
    }
    for kind, body in bodies.items():
        run = jax.shard_map(body, mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=P(("data", "fsdp")))
        found = collectives(compiled(run, mesh, [((64, 16), P(("data", "fsdp")))]), mesh)
        assert [(one.kind, (one.axes, one.bytes), one.count) for one in found] == [(kind, expected[kind], 1)]


def test_no_communication_no_collectives():
    mesh = make_mesh({"data": 8})
    assert collectives(compiled(jnp.tanh, mesh, [((64, 16), P("data"))]), mesh) == []


SIZES = {"dcn": 2, "fsdp": 8}
FSDP = [list(range(8)), list(range(8, 16))]
DCN = [[i, i + 8] for i in range(8)]


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", FSDP),
        ("{{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}", DCN),
        ("[2,8]<=[16]", FSDP),
        ("[8,2]<=[2,8]T(1,0)", DCN),
        ("mesh['dcn'=2,'fsdp'=8] {'fsdp'}", FSDP),
        ("mesh['dcn'=2,'fsdp'=8] {'dcn'}", DCN),
        ("mesh['a'=2,'b'=1,'c'=8] {'a'}", DCN),
        ("mesh['axis_0'=8,'axis_1'=2], device_ids=([2,8]T(1,0)) {'axis_0'}", FSDP),
        ("mesh['axis_0'=8,'axis_1'=2], device_ids=([2,8]T(1,0)) {'axis_1'}", DCN),
        ("mesh['x'=16] {'x':(1)2}", DCN),
        ("mesh['x'=16] {'x':(2)8}", FSDP),
        ("mesh['x'=16] {'x'}", [list(range(16))]),
        ("{}", [list(range(16))]),
    ],
)
def test_spellings_of_groups(spelling, groups):
    line = f", channel_id=1, replica_groups={spelling}, use_global_device_ids=true, to_apply=%add"
    assert parse_groups(line, 16) == frozenset(map(frozenset, groups))
    program = f"""
ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {{
  %x = bf16[4,8]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  ROOT %sum = bf16[4,8]{{1,0:T(8,128)(2,1)S(1)}} all-reduce(%x){line}
}}
"""
    axes = {8: ("fsdp",), 2: ("dcn",), 16: ("dcn", "fsdp")}[len(groups[0])]
    assert collectives(program, SIZES) == [Collective("all-reduce", axes, 64, 1, "bf16", "main")]


def test_transposed_iota_against_numpy():
    for shape, permutation in [((2, 2, 4), (1, 2, 0)), ((4, 2, 2), (2, 0, 1)), ((2, 4, 2), (0, 2, 1))]:
        order = np.arange(16).reshape(shape).transpose(permutation).reshape(-1, 4)
        written = f"[4,4]<=[{','.join(map(str, shape))}]T({','.join(map(str, permutation))})"
        assert parse_groups(f"replica_groups={written}", 16) == frozenset(map(frozenset, order.tolist()))


def test_groups_of_axes_against_numpy():
    sizes = {"a": 2, "b": 3, "c": 4}
    order = np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2).reshape(3, -1)
    assert groups_of(sizes, ["a", "c"]) == frozenset(map(frozenset, order.tolist()))


def test_groups_that_no_axes_give():
    program = """
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %sum = f32[4]{0} all-reduce(%x), replica_groups={{0,1},{2,4},{3,5}}, to_apply=%add
}
"""
    assert [one.axes for one in collectives(program, {"data": 6})] == [None]


ASYNC = """
HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%wrapped (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%all-reduce-scatter.1 (p.1: f32[64]) -> f32[8] {
  %p.1 = f32[64]{0} parameter(0)
  %ar.1 = f32[64]{0} all-reduce(%p.1), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %id = u32[] partition-id()
  ROOT %ds = f32[8]{0} dynamic-slice(%ar.1, %id), dynamic_slice_sizes={8}
}

ENTRY %main (x: f32[8], y: f32[64]) -> (f32[64], f32[64], f32[8], f32[8], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %y = f32[64]{0} parameter(1)
  %ags = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %agd = f32[64]{0} all-gather-done(%ags)
  %ars = f32[64]{0} all-reduce-start(%y), replica_groups=[1,8]<=[8], to_apply=%add
  %ard = f32[64]{0} all-reduce-done(%ars)
  %cps = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %cpd = f32[8]{0} collective-permute-done(%cps)
  %rss = ((f32[64]{0}), f32[8]{0}) async-start(%y), calls=%wrapped
  %rsd = f32[8]{0} async-done(%rss)
  %fus = f32[8]{0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %out = (f32[64]{0}, f32[64]{0}, f32[8]{0}, /*index=3*/f32[8]{0}, f32[8]{0}) tuple(%agd, %ard, %cpd, %rsd, %fus)
}
"""


def test_asynchronous_forms_and_fusions():
    found = summary(collectives(ASYNC, {"fsdp": 8}))
    assert found == {
        ("all-gather", ("fsdp",), 256): 1,
        ("all-reduce", ("fsdp",), 256): 1,
        ("collective-permute", ("fsdp",), 32): 1,
        ("reduce-scatter", ("fsdp",), 256): 2,
    }


BESIDE = """
%start (p: bf16[2,8]) -> (bf16[2,8], bf16[2,64], u32[]) {
  %p = bf16[2,8]{1,0} parameter(0)
  %ag = bf16[2,64]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
  ROOT %started = (bf16[2,8]{1,0}, bf16[2,64]{1,0}, u32[]) custom-call(%ag), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p.1: bf16[2,8], q.1: bf16[2,64], m: f32[4,4]) -> (f32[4,4], bf16[2,8], bf16[2,64]) {
  %p.1 = bf16[2,8]{1,0} parameter(0)
  %q.1 = bf16[2,64]{1,0} parameter(1)
  %m = f32[4,4]{1,0} parameter(2)
  %product = f32[4,4]{1,0} convolution(%m, %m), dim_labels=bf_io->bf
  %ag.1 = bf16[2,64]{1,0} all-gather(%p.1), channel_id=7, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
  ROOT %both = (f32[4,4]{1,0}, bf16[2,8]{1,0}, bf16[2,64]{1,0}) tuple(%product, %p.1, %ag.1)
}

%done (p.2: bf16[2,8], q.2: bf16[2,64]) -> bf16[2,64] {
  %p.2 = bf16[2,8]{1,0} parameter(0)
  %q.2 = bf16[2,64]{1,0} parameter(1)
  %ag.2 = bf16[2,64]{1,0} all-gather(%p.2), channel_id=7, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
  ROOT %whole = bf16[2,64]{1,0} custom-call(%p.2, %q.2, %ag.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[2,8], y: f32[4,4]) -> (f32[4,4], bf16[2,64], bf16[2,64]) {
  %x = bf16[2,8]{1,0} parameter(0)
  %y = f32[4,4]{1,0} parameter(1)
  %other = bf16[2,64]{1,0} all-gather(%x), channel_id=8, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
  %s = (bf16[2,8]{1,0}, bf16[2,64]{1,0}, u32[]) fusion(%x), kind=kCustom, calls=%start
  %s0 = bf16[2,8]{1,0} get-tuple-element(%s), index=0
  %s1 = bf16[2,64]{1,0} get-tuple-element(%s), index=1
  %f = (f32[4,4]{1,0}, bf16[2,8]{1,0}, bf16[2,64]{1,0}) fusion(%s0, %s1, %y), calls=%async_collective_fusion.1
  %f0 = f32[4,4]{1,0} get-tuple-element(%f), index=0
  %f1 = bf16[2,8]{1,0} get-tuple-element(%f), index=1
  %f2 = bf16[2,64]{1,0} get-tuple-element(%f), index=2
  %d = bf16[2,64]{1,0} fusion(%f1, %f2), kind=kCustom, calls=%done
  ROOT %out = (f32[4,4]{1,0}, bf16[2,64]{1,0}, bf16[2,64]{1,0}) tuple(%f0, %d, %other)
}
"""


def test_a_collective_beside_products_counts_once():
    """libtpu prints it in the fusion that starts it, in each that it runs beside, and in the one that ends it."""
    found = collectives(BESIDE, {"fsdp": 8})
    assert [(one.kind, one.bytes, one.count, one.computation) for one in found] == [
        ("all-gather", 256, 1, "start"),
        ("all-gather", 256, 1, "main"),
    ]
    # without a start they are collectives like others
    assert len(collectives(BESIDE.replace("AsyncCollectiveStart", "AnotherCall"), {"fsdp": 8})) == 4


BETWEEN_SLICES = """
ENTRY %main (loss: f32[1], a: f32[1024], b: f32[512]) -> f32[2048] {
  %loss = f32[1]{0} parameter(0)
  %a = f32[1024]{0} parameter(1)
  %b = f32[512]{0} parameter(2)
  %token = token[] after-all()
  %packed = f32[1537]{0} concatenate(%loss, %a, %b), dimensions={0}
  %copied = f32[1537]{0} copy(%packed)
  %filled = f32[2048]{0} custom-call(%copied), custom_call_target="ZeroCrop"
  %tiles = f32[2,8,128]{2,1,0} bitcast(%filled)
  %send = (f32[2,8,128]{2,1,0}, u32[], token[]) send(%tiles, %token), channel_id=1, is_host_transfer=true, ATTRIBUTES
  %sent = token[] send-done(%send), channel_id=1, is_host_transfer=true
  ROOT %out = f32[2048]{0} bitcast(%tiles)
}
""".replace(
    "ATTRIBUTES",
    'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}',
)


def test_a_number_packed_into_a_message_between_slices():
    """It is listed apart, as is what fills its tile: codes can be told from both, and all add up to what is sent."""
    found = collectives(BETWEEN_SLICES, {"replica": 2, "fsdp": 4})
    assert [(one.kind, one.axes, one.bytes) for one in found] == [
        ("all-reduce", ("replica",), 1536 * 4),
        ("all-reduce", ("replica",), 4),
        ("all-reduce", ("replica",), 511 * 4),
    ]
    arrays = BETWEEN_SLICES.replace("(%loss, %a, %b)", "(%a, %b)")
    assert [one.bytes for one in collectives(arrays, {"replica": 2, "fsdp": 4})] == [2048 * 4]
    alone = BETWEEN_SLICES.replace("(%tiles, %token)", "(%loss, %token)")
    assert [one.bytes for one in collectives(alone, {"replica": 2, "fsdp": 4})] == [2048 * 4]


TUPLE = """
%sliced (p: f32[8,8], i: s32[]) -> f32[1,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %ds = f32[1,8]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,8}
}

ENTRY %main (x: f32[8,8], y: f32[8,8], z: f32[], i: s32[]) -> (f32[1,8], f32[1,8], f32[]) {
  %x = f32[8,8]{1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %z = f32[] parameter(2)
  %i = s32[] parameter(3)
  %ar = (f32[8,8]{1,0}, f32[8,8]{1,0}, f32[]) all-reduce(%x, %y, %z), replica_groups={}, to_apply=%add
  %a = f32[8,8]{1,0} get-tuple-element(%ar), index=0
  %b = f32[8,8]{1,0} get-tuple-element(%ar), index=1
  %c = f32[] get-tuple-element(%ar), index=2
  %as = f32[1,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%sliced
  %copied = f32[8,8]{0,1} copy(%b)
  %bs = f32[1,8]{1,0} fusion(%copied, %i), kind=kLoop, calls=%sliced
  ROOT %out = (f32[1,8]{1,0}, f32[1,8]{1,0}, f32[]) tuple(%as, %bs, %c)
}
"""


def test_a_tuple_of_which_some_is_sliced():
    found = summary(collectives(TUPLE, {"data": 8}))
    assert found == {("reduce-scatter", ("data",), 512): 1, ("all-reduce", ("data",), 4): 1}
    # an array that is also wanted whole
    whole = TUPLE.replace("tuple(%as, %bs, %c)", "tuple(%as, %b, %c)")
    found = summary(collectives(whole, {"data": 8}))
    assert found == {("reduce-scatter", ("data",), 256): 1, ("all-reduce", ("data",), 260): 1}
    # a slice of a quarter is not what one of eight devices keeps
    quarter = TUPLE.replace("f32[1,8]", "f32[2,8]").replace("sizes={1,8}", "sizes={2,8}")
    assert summary(collectives(quarter, {"data": 8})) == {("all-reduce", ("data",), 516): 1}


LOOP = """
%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %sum = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  ROOT %out = (s32[], f32[4]{0}) tuple(%next, %sum)
}

%condition (t.1: (s32[], f32[4])) -> pred[] {
  %t.1 = (s32[], f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %bound = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %bound), direction=LT
}

ENTRY %main (t.2: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t.2 = (s32[], f32[4]{0}) parameter(0)
  ROOT %loop = (s32[], f32[4]{0}) while(%t.2), condition=%condition, body=%body
}
"""


@functools.cache
def loop(text: str) -> tuple[int, bool, bool]:
    (one,) = collectives(text, {"data": 8})
    return one.count, one.in_loop, one.trips_known


def test_trips_of_a_loop():
    assert loop(LOOP) == (7, True, True)
    noted = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert loop(noted) == (5, True, True)
    until = LOOP.replace("direction=LT", "direction=NE")
    assert loop(until) == (1, True, False)


SHORT_FORMS = """
%body (state: (f32[4], (bf16[8,2], f32[]))) -> (f32[4], (bf16[8,2], f32[])) {
  %state = (f32[4]{0}, (bf16[8,2]{1,0}, f32[])) parameter(0)
  %sum = f32[4]{0} add(%state#0, %state#0)
  %wide = f32[8,2]{1,0} convert(%state#1#0)
  ROOT %out = (f32[4]{0}, (bf16[8,2]{1,0}, f32[])) tuple(%sum, /*index=1*/%state#1)
}
"""


def test_elements_and_places_written_short():
    """`%tuple#1` is an element that no instruction takes out, `/*index=1*/` a remark."""
    ops = HloProgram(SHORT_FORMS).computations["body"].instructions
    assert ops["out"].operands == ["sum", "state#1"]
    assert (ops["state#0"].opcode, ops["state#0"].operands, ops["state#0"].type) == (
        "get-tuple-element",
        ["state"],
        "f32[4]{0}",
    )
    assert (ops["state#1#0"].operands, ops["state#1#0"].type) == (["state#1"], "bf16[8,2]{1,0}")


LINE_BREAKS = """
%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %k = f32[4]{0} custom-call(%state#1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"metadata":"{\\"block\\": 512}"
}}, metadata={op_name="jit(step)/attend/pallas_call"}, backend_config={"body":"TUzv"}
  %element = f32[4]{0} bitcast(%k), frontend_attributes={kernel_metadata={
}}, metadata={op_name="jit(step)/attend"}
  ROOT %out = (s32[], f32[4]{0}) tuple(%state#0, %element)
}, execution_thread="sparsecore"

ENTRY %main (x: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = (s32[], f32[4]{0}) parameter(0)
  ROOT %loop = (s32[], f32[4]{0}) while(%x), condition=%cond, body=%body
}
"""


def test_attributes_with_line_breaks():
    """A Pallas kernel's metadata is printed over several lines; one begins as the end of a computation does."""
    program = HloProgram(LINE_BREAKS)
    assert list(program.computations) == ["body", "main"]
    ops = program.computations["body"].instructions
    assert [name for name in ops if "#" not in name] == ["state", "k", "element", "out"]
    assert ops["out"].is_root
    assert 'op_name="jit(step)/attend/pallas_call"' in ops["k"].attributes
    assert ValueNames(program, Sources(LINE_BREAKS)).user_name("loop", (1,)) == "attend/pallas_call"


def test_the_start_of_an_all_reduce_counts_its_results_alone():
    """XLA:GPU of JAX 0.12 prints operands and results; those before it, and others, the results."""
    text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = START all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %done = f32[8]{0} all-reduce-done(%start)
}
"""
    for start in ("((f32[8]{0}), f32[8]{0})", "f32[8]{0}"):
        (found,) = collectives(text.replace("START", start), {"replica": 2})
        assert (found.kind, found.bytes) == ("all-reduce", 32)
