"""Models as values: a value builds its module, scores a batch, and reports the sizes that a mesh divides.

| file | defines |
|---|---|
| decoder, decoder_module | `Decoder`, whose fields make it a Llama, GPT-2, Qwen3 or Gemma-2 |
| vit, vit_module | `ViT` |
| resnet, resnet_module | `ResNet` |
| field_checks | checks of the fields of these values |
| classify | cross-entropy and accuracy of image classifiers |
| huggingface | `Pretrained`, `load_module`, `save_module`: model folders of Hugging Face's transformers |
| huggingface_config, huggingface_families, huggingface_tensors, safetensors_folder | the parts of `huggingface` |
| lora | `LoRA`: a model with adapters of low rank, which are trained instead of the weights |
| foreign, foreign_* | `ForeignModel`, `linen_model`: foreign models, plain Flax NNX or Linen |

The names of this module load on first use; `Decoder`, `ViT` and `ResNet` import neither JAX nor Flax.
"""

from typing import TYPE_CHECKING

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "CrossEntropy": "jaxscale.models.foreign",
    "Decoder": "jaxscale.models.decoder",
    "ForeignModel": "jaxscale.models.foreign",
    "Llama3Scaling": "jaxscale.models.decoder",
    "LoRA": "jaxscale.models.lora",
    "Pretrained": "jaxscale.models.huggingface",
    "ResNet": "jaxscale.models.resnet",
    "ViT": "jaxscale.models.vit",
    "classification": "jaxscale.models.foreign",
    "describe": "jaxscale.models.huggingface",
    "language_model": "jaxscale.models.foreign",
    "linen_model": "jaxscale.models.foreign",
    "load_module": "jaxscale.models.huggingface",
    "read_config": "jaxscale.models.huggingface",
    "save_module": "jaxscale.models.huggingface",
}
"""For each public name, the module from which the name loads on first use."""

if TYPE_CHECKING:
    from jaxscale.models.decoder import Decoder, Llama3Scaling
    from jaxscale.models.foreign import CrossEntropy, ForeignModel, classification, language_model, linen_model
    from jaxscale.models.huggingface import Pretrained, describe, load_module, read_config, save_module
    from jaxscale.models.lora import LoRA
    from jaxscale.models.resnet import ResNet
    from jaxscale.models.vit import ViT

__all__ = [
    "CrossEntropy", "Decoder", "ForeignModel", "Llama3Scaling", "LoRA", "Pretrained", "ResNet", "ViT", "classification",
    "describe", "language_model", "linen_model", "load_module", "read_config", "save_module",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME)
