"""The layers of models.

| file | defines |
|---|---|
| linear | `matmul`, `Linear` |
| norm | `RMSNorm`, `LayerNorm` |
| embedding | `Embedding`, `PositionTable` |
| rotary | `Rotary` |
| attention | `Attention` |
| attend_on_mesh, attention_chunked, attention_kernel, attention_splash | `attend` and its implementations on a mesh |
| cache | `KVCache` |
| mlp | `MLP` |
| dropout | `Dropout` |
| conv | convolutions and batch norm |
| stack, layer_group | `Stack` of blocks of one structure, `Chain` of blocks of different structures |
| loss, loss_kernel | `cross_entropy`, `logits` |
| shards, traced_device | where a kernel runs: the shards on a mesh, and the device |

Parameters are `nnx.Param`s with names of logical axes. They are created in float32, without a mesh; the train step
places them on its mesh.
"""

from typing import TYPE_CHECKING

import flax

from jaxscale.lazy import lazy_names

_MODULE_BY_NAME = {
    "Attention": "jaxscale.layers.attention",
    "BatchNorm": "jaxscale.layers.conv",
    "Chain": "jaxscale.layers.stack",
    "Conv": "jaxscale.layers.conv",
    "Dropout": "jaxscale.layers.dropout",
    "Embedding": "jaxscale.layers.embedding",
    "KVCache": "jaxscale.layers.cache",
    "LayerNorm": "jaxscale.layers.norm",
    "Linear": "jaxscale.layers.linear",
    "MLP": "jaxscale.layers.mlp",
    "PositionTable": "jaxscale.layers.embedding",
    "RMSNorm": "jaxscale.layers.norm",
    "Rotary": "jaxscale.layers.rotary",
    "Stack": "jaxscale.layers.stack",
    "attend": "jaxscale.layers.attend_on_mesh",
    "cross_entropy": "jaxscale.layers.loss",
    "logits": "jaxscale.layers.loss",
    "matmul": "jaxscale.layers.linear",
    "max_pool": "jaxscale.layers.conv",
}
"""For each public name, the module from which the name loads on first use."""

if TYPE_CHECKING:
    from jaxscale.layers.attend_on_mesh import attend
    from jaxscale.layers.attention import Attention
    from jaxscale.layers.cache import KVCache
    from jaxscale.layers.conv import BatchNorm, Conv, max_pool
    from jaxscale.layers.dropout import Dropout
    from jaxscale.layers.embedding import Embedding, PositionTable
    from jaxscale.layers.linear import Linear, matmul
    from jaxscale.layers.loss import cross_entropy, logits
    from jaxscale.layers.mlp import MLP
    from jaxscale.layers.norm import LayerNorm, RMSNorm
    from jaxscale.layers.rotary import Rotary
    from jaxscale.layers.stack import Chain, Stack

__all__ = [
    "MLP",
    "Attention",
    "BatchNorm",
    "Chain",
    "Conv",
    "Dropout",
    "Embedding",
    "KVCache",
    "LayerNorm",
    "Linear",
    "PositionTable",
    "RMSNorm",
    "Rotary",
    "Stack",
    "attend",
    "cross_entropy",
    "logits",
    "matmul",
    "max_pool",
]  # fmt: skip

__getattr__ = lazy_names(__name__, _MODULE_BY_NAME)

# layers name logical axes, which a step maps to its mesh; `nnx.use_eager_sharding` would affect only this thread
flax.config.update("flax_always_shard_variable", False)
