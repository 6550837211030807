"""Tuning: what it keeps, what a file says, that a kernel takes it from there, and what is refused."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import tiles, tune
from pallas_kernels.adam8 import api
from pallas_kernels.adam8.cases import Case
from pallas_kernels.adam8.tpu import Tiles, candidates
from pallas_kernels.target import Target
from tests.kernels.aot import tpu_compiler

CASE = Case("", 1, 4096, 1024)
TRIED = [tune.TilingResult(one) for one in candidates(CASE)]


def test_what_is_kept_without_a_device_is_called_static():
    refused = [tune.TilingResult(TRIED[0].tiles, "too large"), *TRIED[1:]]
    chosen = tune.fastest(refused)
    assert chosen is TRIED[1]
    said = tune.measurement_text(chosen, len(refused))
    assert said.startswith("static: the first tiling that compiles, of")
    assert "not timed" in said
    assert tune.fastest([tune.TilingResult(None, "too large")]) is None


def test_a_kernel_takes_its_tiles_from_the_file(tmp_path, monkeypatch):
    tiles.entries.cache_clear()
    monkeypatch.setattr(tiles, "FOLDER", tmp_path)
    slow, fast = candidates(CASE)[0], candidates(CASE)[3]
    found = tune.fastest([tune.TilingResult(slow, seconds=2e-3), tune.TilingResult(fast, seconds=1e-3)])
    made = tune.entry("adam8", api.tile_facts(CASE), found.tiles, tune.measurement_text(found, 2), "command")
    written = tune.merged_entries([], [made])
    (tmp_path / "v5e.json").write_text(json.dumps(written))
    try:
        assert api.tiles_for(CASE, Target("tpu", "v5e")) == fast
        assert api.tiles_for(CASE, Target("tpu", "v6e")) == candidates(CASE, "v6e")[0]
        other = Case("", 1, 384, 128)
        assert api.tiles_for(other, Target("tpu", "v5e")) in candidates(other, "v5e")
    finally:
        tiles.entries.cache_clear()
    assert "1000.0 us, the fastest of 2" in written[0]["measured"]


def test_tiles_check_themselves():
    with pytest.raises(ValueError, match="tiles of -1 blocks"):
        Tiles(-1, 8)


@pytest.mark.slow
@tpu_compiler
def test_without_a_device_it_says_what_compiles():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pallas_kernels.tune", "quantize", "--chip", "v5e"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "columns8_4k on v5e: Tiles(rows=1024, cols=256): compiles; not timed <-" in run.stdout
