"""The golden folders, and what stands in them."""

import functools
import json
from pathlib import Path

import safetensors.numpy

GOLDEN = Path(__file__).parent.parent / "golden"
DECODERS = ("llama", "llama31_rope_tied", "gpt2", "qwen3", "gemma2")


@functools.cache
def golden(name):
    """Arrays and figures of one golden."""
    arrays = safetensors.numpy.load_file(GOLDEN / name / "golden.safetensors")
    return arrays, json.loads((GOLDEN / name / "golden.json").read_text())
