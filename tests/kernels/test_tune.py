"""The command that tunes: what it takes, what it refuses, and what it makes of attention's passes."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from pallas_kernels import ahead, tiles, tune
from pallas_kernels.attention import cases, gpu_sizes, tpu_sizes, tuning
from tests.kernels.aot import Compiled, gpu_compiler, tpu_compiler

CASES = {one.name: one for one in cases.CASES if {"aot", "bench"} & set(one.tags)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("adam9 --chip v5e", "kernel 'adam9', expected one of attention, .*; did you mean 'adam8'"),
        ("atention --chip v5e", "did you mean 'attention'"),
        ("attention --chip h20", "chip 'h20', expected one of v4, .*; did you mean 'h200'"),
        ("adam8 --chip h200", "chip 'h200', expected one of v4, .*: on GPUs the tiles of adam8 are fixed"),
        ("attention --chip v5e --case windw_4k", "case 'windw_4k', .*; did you mean 'window_4k'"),
        ("attention", "--chip"),
    ],
)
def test_what_is_unknown_is_refused(words, says, capsys, monkeypatch):
    monkeypatch.setattr(ahead, "prepare", lambda: None)  # it would take the CPU's devices from the tests to come
    with pytest.raises(SystemExit):
        tune.main(words.split())
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(("chip", "extra"), [("v5e", "aot-tpu"), ("h200", "aot-gpu")])
def test_a_missing_compiler_is_told(chip, extra, monkeypatch):
    monkeypatch.setattr(ahead.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"{chip} is not here, .*pip install jaxscale\[{extra}\]"):
        ahead.device(chip)


def test_flags_of_other_compilers_are_dropped(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_x=1 --xla_dump_to=d --xla_force_host_platform_device_count=8")
    ahead.prepare()
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=d"


def test_a_warning_of_ptxas_is_not_counted_again():
    kernel = "8 bytes spill stores, 16 bytes spill loads"
    said = f"ptxas warning : Registers are spilled to local memory in function 'one', {kernel}\n"
    said += f"    16 bytes stack frame, {kernel}\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    assert ahead.Compiled(compiler_output=said).spilled_bytes == Compiled(said=said).spilled == 24
    assert ahead.Compiled(compiler_output=2 * said).spilled_bytes == 48


@pytest.mark.parametrize(("platform", "sizes"), [("tpu", tpu_sizes), ("gpu", gpu_sizes)])
def test_every_candidate_of_attention_fits_and_none_comes_twice(platform, sizes):
    for case in CASES.values():
        asked = tuning.problem_of(case, platform)
        found = tuning.candidates_for(asked, platform)
        assert found[0].tiles == sizes.choose_tiles(None, asked)
        assert set(found[0].passes) == set(tuning.FIELDS[platform])
        named = [(name, tile) for one in found for name, tile in one.passes.items()]
        assert len(named) == len(set(named))
        assert len(found) > 1 or (platform == "gpu" and case.H == 256), case  # where one tiling fits the shared memory
        for one in found:
            sizes.check_tiles(one.tiles, asked)
            assert sizes.fits(asked, one.tiles)


def test_the_cheapest_of_each_pass_is_taken_if_it_is_worth_it():
    every = tuning.candidates_for(tuning.problem_of(CASES["full_4k"], "tpu"), "tpu")
    tried = [every[0], *(one for one in every[1:] if "dq" in one.passes)][:3]
    costs = [dict.fromkeys(tuning.FIELDS["tpu"], 100.0), {"dq": 90.0, "dkv": 99.0}, "too large"]
    rule = tried[0].tiles
    found, told = tuning.best_tiles(tried, costs, "tpu", 0.03)
    q, kv = tried[1].passes["dq"]
    assert found == dataclasses.replace(rule, q_dq=q, kv_dq=kv)
    assert told == {"forward": (100, 100), "dq": (90, 100), "dkv": (100, 100)}
    with pytest.raises(ValueError, match="none of the tilings that were tried compiles: too large"):
        tuning.best_tiles(tried, ["too large"] * 3, "tpu", 0.03)


def test_cycles_count_the_tiles_that_are_visited():
    asked = tuning.problem_of(dataclasses.replace(CASES["causal_4k"], B=1, N=1, K=1), "tpu")
    found = ahead.Schedule(always=1, regions=(10, 5000, 1000, 100))
    # 4 x 4 tiles: 6 below the diagonal, 4 on it; 16 steps, 4 rows
    assert tuning.count_cycles(found, asked, "forward", (1024, 1024)) == 16 + 4 * 110 + 4 * 5000 + 6 * 1000
    assert tuning.count_cycles(found, asked, "dkv", (1024, 1024)) == 16 + 4 * 110 + 4 * 5000 + 6 * 1000
    # two tiles of keys of a row of queries: all of the second is seen where the queries begin past it
    assert tuning.count_cycles(found, asked, "dq", (512, 2048)) == 16 + 8 * 110 + 8 * 5000 + 4 * 1000
    full = dataclasses.replace(asked, options=dataclasses.replace(asked.options, causal=False))
    assert tuning.count_cycles(found, full, "forward", (1024, 1024)) == 16 + 4 * 1110 + 16 * 5000
    # a part of four, which is any of them: a quarter of all tiles, but every part's own grid
    part = dataclasses.replace(asked, T=1024, has_offset=True)
    assert tuning.count_cycles(found, part, "forward", (1024, 1024)) == 4 + 110 + (4 * 5000 + 6 * 1000) // 4
    assert tuning.count_cycles(found, part, "dkv", (1024, 1024)) == 4 + 4 * 110 + (4 * 5000 + 6 * 1000) // 4


def test_both_passes_take_their_tiles_from_the_file(tmp_path, monkeypatch):
    """And no other width's, nor larger ones than were compiled."""
    monkeypatch.setattr(tiles, "FOLDER", tmp_path)
    asked = tuning.problem_of(CASES["full_4k"], "tpu")
    chosen = tpu_sizes.Tiles(256, 512, 512, 2048, 256, 1024)
    tune.write("v5e", [tune.entry("attention", asked.case, chosen, "static: ..", "command")])
    tiles.entries.cache_clear()
    try:
        assert tpu_sizes.choose_tiles("v5e", asked) == chosen
        for other in (dataclasses.replace(asked, H=64), dataclasses.replace(asked, T=384)):
            assert tpu_sizes.choose_tiles("v5e", other) == tpu_sizes.choose_tiles(None, other)
        program = tuning.attention_function(dataclasses.replace(CASES["full_4k"], B=1, N=1, K=1), None, "tpu", True)
        monkeypatch.setattr(tuning.api, "target", lambda platform, *operands: tuning.Target("tpu", "v5e"))
        rows = [jax.ShapeDtypeStruct((1, 4096, 1, 128), "bfloat16")] * 3
        text = str(jax.make_jaxpr(program)(*rows))
        assert [text.count(f"grid=({grid})") for grid in ("1, 1, 16, 8", "1, 1, 8, 2", "1, 1, 4, 1, 16")] == [1, 1, 1]
        large = dataclasses.replace(chosen, q_dq=2048)
        (tmp_path / "v5e.json").write_text(json.dumps([tune.entry("attention", asked.case, large, "", "")]))
        tiles.entries.cache_clear()
        assert tpu_sizes.choose_tiles("v5e", asked) == tpu_sizes.choose_tiles(None, asked)
    finally:
        tiles.entries.cache_clear()


def test_the_rule_takes_the_place_of_an_older_entry_unless_it_was_timed():
    old = {"kernel": "attention", "case": {"T": 8}, "measured": "static: ..", "tiles": {"q": 1}}
    rule = old | {"tiles": None}
    timed = old | {"measured": "median of 10: .."}
    assert tune.merged_entries([old], [rule]) == []
    assert tune.merged_entries([timed], [rule]) == [timed]


def said(words):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pallas_kernels.tune", *words.split()]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.mark.slow
@tpu_compiler
def test_without_a_tpu_attention_is_judged_by_the_schedule():
    found = said("attention --chip v5e --case narrow_4k")
    cycles = dict(re.findall(r"(forward|dq|dkv) \(1024, 1024\): ([\d,]+) cycles", found))
    least = 2 * 16 * 4096 * 4097 // 2 * 128 / (4 * 128 * 128)  # half of a matrix unit's rows lie idle at this width
    for name, products in (("forward", 2), ("dq", 3), ("dkv", 4)):
        taken = int(cycles[name].replace(",", ""))
        assert products * least < 4 * taken, (name, taken, least)
        assert taken < 20 * products * least, (name, taken, least)
    assert re.search(r"narrow_4k on v5e: Tiles\(.*\).*: forward \d+ \(by rule \d+\) cycles, dq .*<-", found)


@pytest.mark.slow
@gpu_compiler
def test_without_a_gpu_attention_takes_the_rule_where_nothing_is_spilled():
    found = said("attention --chip h200 --case full_4k")
    assert "full_4k on h200: Tiles(kv=128, kv_dq=64, q_dkv=64, stages=2, stages_backward=2), the rule" in found
    assert "forward 0 (by rule 0) bytes spilled" in found
