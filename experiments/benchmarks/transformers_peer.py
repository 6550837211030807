"""The peer that most people would pick: greedy decoding by transformers' `generate`, eager, in float32.

    python experiments/benchmarks/transformers_peer.py make FOLDER SIZE [SEED]      needs torch and transformers
    python experiments/benchmarks/transformers_peer.py draw FOLDER PROMPT TOKENS REPEATS THREADS

`make` saves a model with random weights; `draw` continues a prompt, and prints wall and processor seconds of each
repeat, and the ids, as one JSON object. It uses nothing of jaxscale.
"""

import json
import os
import sys
import time
from typing import Any

# torch and transformers are no dependencies: they are measured where they happen to be
# pyright: reportMissingImports=false
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"kind": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 256, "n_positions": 256},
    "27M": {"kind": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8, "vocab_size": 4096, "n_positions": 512},
    "SmolLM2": {
        "kind": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}
"""Fields of the configuration by the name of a size. SmolLM2's is that of the model with 135M parameters."""


def make(folder: str, size: str, seed: int) -> None:
    """Save a model with random weights, larger than usual so that the continuation is no repetition."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    fields = dict(SIZES[size])
    is_llama = fields.pop("kind") == "llama"
    torch.manual_seed(seed)
    config = (LlamaConfig if is_llama else GPT2Config)(
        **fields, initializer_range=0.05, bos_token_id=0, eos_token_id=None
    )
    (LlamaForCausalLM if is_llama else GPT2LMHeadModel)(config).save_pretrained(folder)


def draw(folder: str, prompt_length: int, tokens: int, repeats: int, threads: int) -> dict[str, Any]:
    """Continue a prompt `repeats` times, after one call that is not counted."""
    import torch
    from transformers import AutoModelForCausalLM

    if threads == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = (torch.arange(prompt_length) * 7 % model.config.vocab_size)[None]
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    wall_seconds, processor_seconds, ids = [], [], []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            start = time.perf_counter(), time.process_time()
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
            wall_seconds.append(time.perf_counter() - start[0])
            processor_seconds.append(time.process_time() - start[1])
            ids = output[0, prompt_length:].tolist()
    return {"wall": wall_seconds[1:], "processor": processor_seconds[1:], "ids": ids}


if __name__ == "__main__":
    command, folder, *words = sys.argv[1:]
    if command == "make":
        make(folder, words[0], int(words[1]) if len(words) > 1 else 0)
    else:
        print(json.dumps(draw(folder, *map(int, words))))
