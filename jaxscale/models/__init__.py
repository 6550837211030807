"""Models as values: what to build, how to score a batch, what to name the sizes that a mesh divides.

| file | defines |
|---|---|
| decoder, decoder_module | `Decoder`: Llama, GPT-2, Qwen3, Gemma-2 by its fields |
| vit, vit_module | `ViT` |
| huggingface | `load`, `save`, `Pretrained`: folders of transformers |
| huggingface_config, huggingface_families, huggingface_tensors, safetensors_folder | what `huggingface` is made of |
| foreign, foreign_blocks | models that are not ours: plain Flax NNX, Linen through the bridge |

Names below load where they are first used; a value imports neither JAX nor Flax.
"""

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "Decoder": "jaxscale.models.decoder",
    "Llama3Scaling": "jaxscale.models.decoder",
    "Pretrained": "jaxscale.models.huggingface",
    "ViT": "jaxscale.models.vit",
}

if TYPE_CHECKING:
    from jaxscale.models.decoder import Decoder, Llama3Scaling
    from jaxscale.models.huggingface import Pretrained
    from jaxscale.models.vit import ViT

__all__ = ["Decoder", "Llama3Scaling", "Pretrained", "ViT"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'jaxscale.models' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value
