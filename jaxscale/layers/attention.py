"""Attention: the layer around `attend`, with projections, rotary positions, norms of queries and keys, and a cache
(Vaswani et al. 2017; grouped key heads, Ainslie et al. 2023).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.blocks import Context
from jaxscale.errors import UserError
from jaxscale.layers.attend_on_mesh import attend
from jaxscale.layers.cache import KVCache
from jaxscale.layers.dropout import Dropout
from jaxscale.layers.linear import Initializer, Linear
from jaxscale.layers.norm import RMSNorm
from jaxscale.layers.rotary import Rotary
from jaxscale.sharding.place import constrain, move
from jaxscale.typing import Array, Float, Int

__all__ = ["Attention", "attend"]

_KEY_AXES = ("batch", "kv_seq", "kv_heads", "head_dim")
"""Logical axes of keys and values in `attend`."""
_PROJECTED_KEY_AXES = ("batch", "inner_seq", "kv_heads", "head_dim")
"""Logical axes of keys and values after their projection, sharded along the sequence like queries."""


class Attention(nnx.Module):
    """Self-attention: `out(attend(q(x), k(x), v(x)))`.

    Remat refers to the projections by the names "attention_q", "attention_k" and "attention_v", and to the results of
    `attend` by "attention_out" and, for the chunked implementation and kernels, "attention_lse".

    Args:
        embed: width of input and output.
        heads: number of query heads, a multiple of `kv_heads`.
        kv_heads: number of key and value heads.
        head_dim: width of a head.
        rotary: rotation of queries and keys by their positions; `None` for no rotation.
        bias: whether `q`, `k` and `v` have biases.
        out_bias: whether `out` has a bias.
        qk_norm: eps of the RMSNorms over each head of queries and keys, before rotation; `None` for no norms.
        soft_cap: cap of the scores; `None` for no cap.
        window: number of most recent positions that a query sees, including its own; `None` for all.
        scale: factor of the scores; 1 / sqrt(head_dim) by default.
        dropout: rate of the dropout of the output.
        init: initializer of `q`, `k` and `v`.
        out_init: initializer of `out`.
        rngs: random streams; the weights are drawn from `params`.

    Example:
        >>> from flax import nnx
        >>> layer = Attention(8, 4, 2, 2, rotary=Rotary(2), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rotary: Rotary | None = None,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        init: Initializer | None = None,
        out_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        if heads % kv_heads:
            raise UserError(f"attention: got {heads} query heads, expected a multiple of the {kv_heads} key heads")
        if rotary is not None and rotary.head_dim != head_dim:
            raise UserError(f"attention: got a rotary head_dim of {rotary.head_dim}, expected {head_dim}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary, self.soft_cap, self.window, self.scale = rotary, soft_cap, window, scale
        projection_settings: dict[str, Any] = {"bias": bias, "init": init, "rngs": rngs}
        self.q = Linear(embed, heads * head_dim, axes=("embed", "heads"), **projection_settings)
        self.k: Linear | None = Linear(embed, kv_heads * head_dim, axes=("embed", "kv_heads"), **projection_settings)
        self.v: Linear | None = Linear(embed, kv_heads * head_dim, axes=("embed", "kv_heads"), **projection_settings)
        self.out = Linear(heads * head_dim, embed, axes=("heads", "embed"), bias=out_bias, init=out_init, rngs=rngs)
        self.q_norm = None if qk_norm is None else RMSNorm(head_dim, eps=qk_norm)
        self.k_norm = None if qk_norm is None else RMSNorm(head_dim, eps=qk_norm)
        self.dropout = Dropout(dropout, site="attention")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "#B T"] | None = None,
        context: Context = Context(),
        causal: bool = True,
        cache: KVCache | None = None,
        window: int | Int[Array, ""] | str | None = "own",
    ) -> Any:
        """Return the layer's output, without the residual; with a cache, the pair (output, new cache).

        Args:
            x: normed residual stream.
            positions: positions of the tokens, for the rotary angles; the indices in the row by default. The tokens
                of a segment must be in the order of their positions.
            segments: segment of each token. A token sees only tokens of its own segment; segment 0 is padding.
            context: context of the forward pass; its `attention` selects the implementation.
            causal: whether tokens do not see later tokens.
            cache: keys and values of earlier tokens, to which the keys and values of `x` are appended. Segments then
                only mark padding (0), and the default positions continue the positions in the cache.
            window: number of positions that a query sees, or `None` for all; "own" means the layer's `window`.
        """
        batch_size, length, _ = x.shape
        if isinstance(window, str):
            if window != "own":
                raise UserError(f"attention: got window {window!r}, expected a whole number, None, or 'own'")
            window = self.window
        # if the sequence is sharded, this is one gather for the three projections, and one scatter of their gradients
        x = move(x, ("batch", "seq", "embed"), ("batch", "inner_seq", "embed"))
        q, k, v = self._project(x, context)
        q = checkpoint_name(q, "attention_q").reshape(batch_size, length, self.heads, self.head_dim)
        k = checkpoint_name(k, "attention_k").reshape(batch_size, length, self.kv_heads, self.head_dim)
        v = checkpoint_name(v, "attention_v").reshape(batch_size, length, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if positions is None and (self.rotary is not None or cache is not None):
            positions = (0 if cache is None else cache.length) + jnp.arange(length)[None, :]
        if self.rotary is not None:
            assert positions is not None
            q, k = self.rotary.apply(q, positions), self.rotary.apply(k, positions)
        q = constrain(q, "batch", "inner_seq", "heads", "head_dim")
        attend_settings: dict[str, Any] = {
            "causal": causal,
            "window": window,
            "soft_cap": self.soft_cap,
            "scale": self.scale,
            "implementation": context.attention,
        }
        if cache is None:
            attend_settings |= {"q_segments": segments, "kv_segments": segments}
        else:
            is_token = jnp.ones((1, length), bool) if segments is None else segments != 0
            cache = cache.append(k, v, positions, is_token)
            k, v = (array.astype(q.dtype) for array in cache.heads(batch_size))
            attend_settings |= {"q_positions": positions, "kv_positions": cache.positions}
            attend_settings |= {"q_segments": is_token.astype(jnp.int32), "kv_segments": cache.valid.astype(jnp.int32)}
            if context.attention not in ("plain", "chunked"):
                # kernels do not support a cache, but a plan that selects one must still be able to sample
                attend_settings["implementation"] = "auto"
        if cache is None:
            # if the sequence is sharded, this is one gather of keys and values, and one scatter of their gradients;
            # the heads are in one dim, because a TPU would pad gathered heads of 64 to 128
            k, v = (
                move(array.reshape(batch_size, length, -1), _PROJECTED_KEY_AXES[:3], _KEY_AXES[:3]).reshape(array.shape)
                for array in (k, v)
            )
        else:
            k, v = (constrain(array, *_KEY_AXES) for array in (k, v))  # those of the cache are whole already
        head_outputs = constrain(attend(q, k, v, **attend_settings), "batch", "inner_seq", "heads", "head_dim")
        y = self.out(head_outputs.reshape(batch_size, length, self.heads * self.head_dim), context)
        y = constrain(y, "batch", "seq", "embed")
        y = self.dropout(y, context)
        return y if cache is None else (y, cache)

    def _project(self, x: Any, context: Context) -> list[Any]:
        """Return the projections of `x` to queries, keys and values, before they are split into heads."""
        if self.k is not None and self.v is not None:
            return [self.q(x, context), self.k(x, context), self.v(x, context)]
        query_width, key_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return jnp.split(self.q(x, context), [query_width, query_width + key_width], -1)

    def join_projections(self) -> None:
        """Make `q` project to queries, keys and values in one product; `k` and `v` become `None`.

        The weights are concatenated on the host. A device that holds a part of a weight must hold all of it.

        Example:
            >>> from flax import nnx
            >>> layer = Attention(8, 4, 2, 2, bias=True, rngs=nnx.Rngs(0))
            >>> y = layer(jnp.ones((1, 3, 8)))
            >>> layer.join_projections()
            >>> layer.q.weight.shape, bool(jnp.allclose(layer(jnp.ones((1, 3, 8))), y, atol=1e-6))
            ((8, 16), True)
        """
        if self.k is None or self.v is None:
            return
        projections = (self.q, self.k, self.v)
        # the last dim is the output's, also if there is a leading dim of layers
        self.q.weight.set_value(_join_arrays([projection.weight[...] for projection in projections]))
        if self.q.bias is not None:
            self.q.bias.set_value(
                _join_arrays([projection.bias[...] for projection in projections if projection.bias is not None])
            )
        self.k = self.v = None


def _join_arrays(arrays: list[Any]) -> Any:
    """Concatenate arrays along their last dim on the host; the result has the sharding of the first array."""
    host_array = np.concatenate([np.asarray(array) for array in arrays], -1)
    return jax.device_put(host_array, arrays[0].sharding if arrays[0].committed else None)
