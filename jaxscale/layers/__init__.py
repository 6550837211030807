"""The layers of models.

| file | defines |
|---|---|
| linear | `matmul`, `Linear` |
| norm | `RMSNorm`, `LayerNorm` |
| embedding | `Embedding`, `PositionTable` |
| rotary | `Rotary` |
| attention | `Attention`, and `attend`, one definition with three implementations |
| cache | `KVCache` |
| mlp | `MLP` |
| dropout | `Dropout` |
| conv | convolutions and batch norm |
| stack | `Stack` of alike blocks, `Chain` of unlike ones |
| loss | `cross_entropy`, `logits` |

Parameters are `nnx.Param`s with logical axis names, created in float32, on no mesh: the train step places them.
"""

from flax import nnx

nnx.use_eager_sharding(False)
