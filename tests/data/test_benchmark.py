import json
import pathlib
import subprocess
import sys

BENCHMARK = pathlib.Path(__file__).parents[2] / "experiments" / "benchmarks" / "data.py"


def test_the_benchmark_ends_with_its_figures_as_json():
    ran = subprocess.run([sys.executable, str(BENCHMARK), "--tiny"], capture_output=True, text=True, check=True)
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert {"windows_tokens_per_second", "packed_tokens_per_second", "bpe_over_encode_batch"} <= figures.keys()
    assert all(figure.keys() == {"value", "unit", "bar", "holds"} for figure in figures.values())
