"""Records logits of tiny models with random weights, as transformers computes them: Mistral, Qwen2 and SmolLM2.

    python make.py          # torch, transformers 5; writes a folder for each beside this file

Norm scales and biases are moved off 1 and 0, else a swapped norm or a missed bias would not show. SmolLM2's config.json
has the keys that it is published with, in the form of transformers 4, and weights in bfloat16.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "mlp_bias": False,
    "model_type": "llama",
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
}
MODELS = {
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=5, attn_implementation="eager")),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True, attn_implementation="eager")),
    "smollm2": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, tie_word_embeddings=True, rope_theta=100000.0, rms_norm_eps=1e-5),
    ),
}


def main() -> None:
    """Write the folders."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name, (model_class, config) in MODELS.items():
        torch.manual_seed(7)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                shift = 1.0 if "norm" in parameter_name else 0.0
                values = shift + 0.3 * torch.randn_like(parameter)
                parameter.copy_(values.to(torch.bfloat16) if name == "smollm2" else values)
            input_ids = torch.randint(SIZES["vocab_size"], (2, 14))
            logits = model(input_ids).logits
        folder = HERE / name
        if name == "smollm2":
            model.to(torch.bfloat16)  # exact: they are rounded already
        model.save_pretrained(folder)
        if name == "smollm2":
            (folder / "config.json").write_text(json.dumps(SMOLLM2 | SIZES, indent=2) + "\n")
        (folder / "generation_config.json").unlink()
        save_file({"input_ids": input_ids, "logits": logits}, folder / "golden.safetensors")


if __name__ == "__main__":
    main()
