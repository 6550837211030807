import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from jaxscale.errors import UserError
from jaxscale.training.device_times import device_times, kind_of, summary_of
from jaxscale.training.profile import Profiler, ProfileRange


@pytest.mark.parametrize(("text", "first", "stop"), [("10:13", 10, 13), ("7", 7, 8), (" 1 : 2 ", 1, 2)])
def test_ranges(text, first, stop):
    assert ProfileRange.parse(text) == ProfileRange(first, stop)
    assert ProfileRange.parse(str(ProfileRange.parse(text))) == ProfileRange.parse(text)


@pytest.mark.parametrize("text", ["", "13:10", "0:3", "5:5", "-1:4", "a:b", "1:2:3", "10-13"])
def test_bad_ranges(text):
    with pytest.raises(UserError, match="FIRST"):
        ProfileRange.parse(text)


def test_a_range_beyond_the_run_is_refused():
    assert ProfileRange(12, 20).within(12) == ProfileRange(12, 20)
    with pytest.raises(UserError, match=r"profile 13:14: the run has 12 steps, expected FIRST from 1 to 12"):
        ProfileRange(13, 14).within(12)


def test_a_range_behind_the_run_is_missed():
    profiler = Profiler(ProfileRange(10, 13))
    assert [bool(profiler.missed_text(step)) for step in (9, 11, 12, 13)] == [False, False, True, True]


def train_steps(profiler: Profiler, folder, first: int, last: int):
    """A loop of steps with one product and one all-reduce on two devices; what `stop_after` returned and told."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def place(spec):
        return NamedSharding(mesh, spec)

    step = jax.jit(lambda w, x: w + jnp.tanh(x.T @ x) * 1e-3, out_shardings=place(P()))
    w = jax.device_put(jnp.zeros((64, 64)), place(P()))
    x = jax.device_put(jnp.ones((32, 64)), place(P("data")))
    w = jax.block_until_ready(step(w, x))
    told, found = [], []
    for n in range(first, last + 1):
        profiler.start_before(n, folder)
        w = step(w, x)
        # collectives of steps in flight may starve each other on CPU
        jax.block_until_ready(w)
        if profiler.is_last_step(n):

            def event(name, **fields):
                told.append((name, fields))

            found.append(profiler.stop_after(n, folder, w, event, lambda text: told.append(text)))
    return found, told


def test_profiler_summarises_the_steps_asked_for(tmp_path):
    (summary,), told = train_steps(Profiler(ProfileRange(3, 5)), tmp_path, 1, 7)
    assert summary.steps == 2
    assert [time.device for time in summary.devices] == ["CPU:0", "CPU:1"]
    for time in summary.devices:
        by_kind = {kind: [o for o in time.operations if o.kind == kind] for kind in ("matmul", "collective")}
        assert sum(operation.count for operation in by_kind["matmul"]) == 2
        assert sum(operation.count for operation in by_kind["collective"]) == 2
        assert 0 < time.busy <= time.span
        assert sum(time.share(kind) for kind in ("matmul", "collective", "copy", "other")) == pytest.approx(1)
    text = (tmp_path / "profile" / "summary.txt").read_text()
    assert "2 step(s) traced" in text
    assert "all-reduce" in text
    assert told[0][0] == "profile"
    assert told[0][1]["steps"] == "3:5"
    assert 0 < told[0][1]["busy"] <= 1
    assert told[1] == text.rstrip("\n")


def test_a_run_resumed_inside_the_range_traces_the_rest(tmp_path):
    (summary,), _ = train_steps(Profiler(ProfileRange(2, 5)), tmp_path, 4, 6)
    assert summary.steps == 1


def test_a_run_resumed_after_the_range_traces_nothing(tmp_path):
    found, told = train_steps(Profiler(ProfileRange(2, 4)), tmp_path, 4, 6)
    assert (found, told) == ([], [])
    assert not (tmp_path / "profile").exists()


def test_no_trace_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no trace in"):
        summary_of(tmp_path, 1)


def planes(text: str):
    """Planes of an XSpace written as a text proto."""
    from jax.profiler import ProfileData

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
        return device_times(data.planes)


def event(name: int, start_us: int, length_us: int) -> str:
    return f"events {{ metadata_id: {name} offset_ps: {start_us * 10**6} duration_ps: {length_us * 10**6} }}"


def plane(name: str, lines: dict[str, list[str]], names: list[str]) -> str:
    texts = [f'lines {{ id: {i} name: "{line}" {" ".join(events)} }}' for i, (line, events) in enumerate(lines.items())]
    known = [f'event_metadata {{ key: {i} value {{ id: {i} name: "{text}" }} }}' for i, text in enumerate(names, 1)]
    return f'planes {{ name: "{name}" {" ".join(texts + known)} }}'


def test_a_loop_keeps_only_what_its_body_does_not_take():
    names = [
        "%while.1 = (f32[8]) while(%t), body=%b",
        "%fusion.2 = f32[8] fusion(%dot)",
        "%all-reduce.3 = f32[8] all-reduce()",
    ]
    events = [event(1, 0, 100), event(2, 10, 30), event(3, 50, 40), event(2, 150, 50)]
    (time,) = planes(plane("/device:TPU:0", {"XLA Modules": [event(1, 0, 300)], "XLA Ops": events}, names))
    assert time.device == "TPU:0"
    assert {operation.name: round(operation.seconds * 1e6) for operation in time.operations} == {
        "fusion.2": 80,
        "all-reduce.3": 40,
        "while.1": 30,
    }
    assert (round(time.span * 1e6), round(time.busy * 1e6), round(time.longest_gap * 1e6)) == (200, 150, 50)
    assert time.share("collective") == pytest.approx(40 / 150)


def test_streams_of_a_gpu_overlap():
    names = ["sm90_xmma_gemm_bf16", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "MemcpyD2H", "loop_add_fusion"]
    lines = {
        "Stream #1(Compute)": [event(1, 0, 60), event(4, 80, 20)],
        "Stream #2": [event(2, 30, 40), event(3, 70, 5)],
        "Launch Stats": [event(1, 0, 500)],
    }
    (time,) = planes(plane("/device:GPU:0", lines, names))
    kinds = {operation.kind: round(operation.seconds * 1e6) for operation in time.operations}
    assert kinds == {"matmul": 60, "collective": 40, "copy": 5, "other": 20}
    assert (round(time.span * 1e6), round(time.busy * 1e6), round(time.longest_gap * 1e6)) == (100, 95, 5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all-gather-start.3", "collective"),
        ("reduce-scatter.1", "collective"),
        ("collective-permute-done", "collective"),
        ("dot.14", "matmul"),
        ("fusion.7 convolution fusion", "matmul"),
        ("wrapped_convert", "other"),
        ("input_reduce_fusion", "other"),
        ("copy.12", "copy"),
        ("copy_add_fusion", "other"),
        ("transpose.3", "other"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind
