"""Which programs the compile cache keeps and loads, asked of JAX's own cache."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from kept_programs import kept

from jaxscale.compiler.kept_programs import count_excluded, is_ordered, keep_ordered_programs

LOOP = """HloModule jit_step
%body (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %sum = f32[4]{0} OPCODE(%x), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(step)/while/psum"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %first = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %last = f32[4]{0} while(%first), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize("opcode", ["all-reduce", "all-gather-start", "collective-permute", "reduce-scatter", "send"])
def test_collectives_below_the_entry_lose_their_order(opcode):
    assert not is_ordered(LOOP.replace("OPCODE", opcode))


@pytest.mark.parametrize("opcode", ["negate", "fusion", "custom-call"])
def test_those_of_the_entry_keep_it(opcode):
    assert is_ordered(LOOP.replace("OPCODE", opcode))


def sums(devices: int, looped: bool):
    """A program of that many devices that adds up over them, in a loop or outside."""
    mesh = jax.make_mesh((devices,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])

    def program(x):
        for _ in range(0 if looped else 2):
            x = jax.lax.psum(x, "x") / devices
        return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "x") if looped else x * 2, None), x, None, length=3)[0]

    specs = {"in_specs": jax.P("x"), "out_specs": jax.P(), "check_vma": False}
    x = jax.device_put(jnp.ones((devices, 256)), jax.sharding.NamedSharding(mesh, jax.P("x")))
    return jax.jit(jax.shard_map(program, mesh=mesh, **specs)), x


def compiled(folder: Path, devices: int, looped: bool) -> tuple[int, int, int]:
    """Entries of the cache for the program, loads of one, and programs left out, of compiling it."""
    loads, before = [], count_excluded()
    listener = lambda event, **_: loads.append(event) if event.endswith("/cache_hits") else None  # noqa: E731
    program, x = sums(devices, looped)
    with kept(folder):
        jax.monitoring.register_event_listener(listener)
        try:
            program.lower(x).compile()
        finally:
            jax.monitoring.unregister_event_listener(listener)
    return len(list(folder.glob("jit_program-*-cache"))), len(loads), count_excluded() - before


@pytest.mark.parametrize(("devices", "looped"), [(1, True), (2, False)])
def test_ordered_programs_are_kept_and_loaded(tmp_path, devices, looped):
    assert compiled(tmp_path, devices, looped) == (1, 0, 0)
    assert compiled(tmp_path, devices, looped) == (1, 1, 0)


def test_a_loop_with_collectives_is_compiled_each_time(tmp_path):
    assert compiled(tmp_path, 2, True) == (0, 0, 1)
    assert compiled(tmp_path, 2, True) == (0, 0, 1)


def test_one_that_a_cache_holds_already_is_not_loaded(tmp_path, monkeypatch):
    keep_ordered_programs()
    with monkeypatch.context() as patch:
        patch.setattr("jaxscale.compiler.kept_programs.is_ordered", lambda _: True)
        assert compiled(tmp_path, 2, True) == (1, 0, 0)
        assert compiled(tmp_path, 2, True) == (1, 1, 0)
    assert compiled(tmp_path, 2, True) == (1, 0, 1)


def test_a_program_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    keep_ordered_programs()
    write_bytes = Path.write_bytes

    def write_half(path, content):
        write_bytes(path, content[: len(content) // 2])
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        with pytest.warns(UserWarning, match="the disk is full"):
            assert compiled(tmp_path, 1, False) == (0, 0, 0)
    assert not any(path.name.startswith("jit_program") for path in tmp_path.iterdir())
    assert compiled(tmp_path, 1, False) == (1, 0, 0)
