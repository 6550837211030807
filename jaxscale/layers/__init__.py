"""The layers of models.

| file | defines |
|---|---|
| linear | `matmul`, `Linear` |
| norm | `RMSNorm`, `LayerNorm` |
| embedding | `Embedding`, `PositionTable` |
| rotary | `Rotary` |
| attention | `Attention` |
| attend, attention_chunked, attention_kernel, attention_splash | `attend`, and its implementations on a mesh |
| cache | `KVCache` |
| mlp | `MLP` |
| dropout | `Dropout` |
| conv | convolutions and batch norm |
| stack, layer_group | `Stack` of blocks of one structure, `Chain` of different ones |
| loss, loss_kernel | `cross_entropy`, `logits` |
| shards, traced_device | where a kernel runs: its shards on a mesh, and the device |

Parameters are `nnx.Param`s with logical axis names, created in float32, on no mesh: the train step places them.
"""

from flax import nnx

nnx.use_eager_sharding(False)
