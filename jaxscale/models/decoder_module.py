"""The module of a `Decoder`: an embedding, a stack of blocks, a norm and a head.

The module reads like code for one device; a plan's layout, remat and precision reach it through `layers`, `constrain`
and the context.
"""

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context, Loss
from jaxscale.errors import UserError
from jaxscale.layers.attention import Attention
from jaxscale.layers.cache import KVCache
from jaxscale.layers.dropout import Dropout
from jaxscale.layers.embedding import Embedding, PositionTable
from jaxscale.layers.loss import cross_entropy, logits
from jaxscale.layers.mlp import MLP
from jaxscale.layers.norm import LayerNorm, RMSNorm
from jaxscale.layers.rotary import Rotary
from jaxscale.layers.stack import Stack
from jaxscale.models.decoder import Decoder
from jaxscale.models.field_checks import check_batch
from jaxscale.sharding.place import constrain
from jaxscale.typing import Array, Batch, Float, Int


def make_norm(config: Decoder) -> RMSNorm | LayerNorm:
    """Make a norm over the residual stream, of the type and with the settings that the model value specifies."""
    if config.norm == "rms":
        return RMSNorm(config.embed, eps=config.norm_eps, plus_one=config.norm_plus_one)
    return LayerNorm(config.embed, eps=config.norm_eps, bias=config.norm == "layer")


def make_attention(config: Decoder, initializer_by_name: dict[str, Any], rngs: nnx.Rngs) -> Attention:
    """Make the attention of a block; `initializer_by_name` has the keys `init` and `out_init`."""
    rotary = None
    if config.positions == "rotary":
        rotary = Rotary(config.head_width, config.rotary_base, config.rotary_scaling)
    return Attention(
        config.embed,
        config.heads,
        config.kv_count,
        config.head_width,
        rotary=rotary,
        bias=bool(config.attention_bias),
        out_bias=config.attention_bias is True,
        qk_norm=config.norm_eps if config.qk_norm else None,
        soft_cap=config.attention_soft_cap,
        scale=config.attention_scale,
        dropout=config.dropout,
        rngs=rngs,
        **initializer_by_name,
    )


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; Gemma-2 also norms the two added terms."""

    def __init__(self, config: Decoder, rngs: nnx.Rngs):
        out_std = config.init_std / math.sqrt(2 * config.layers) if config.scaled_init else config.init_std
        initializer_by_name = {
            "init": nnx.initializers.normal(config.init_std),
            "out_init": nnx.initializers.normal(out_std),
        }
        self.attention_norm = make_norm(config)
        self.attention = make_attention(config, initializer_by_name, rngs)
        self.attention_post_norm = make_norm(config) if config.post_norms else None
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(
            config.embed,
            config.mlp_width,
            kind=config.mlp_kind,
            bias=config.mlp_bias,
            dropout=config.dropout,
            rngs=rngs,
            **initializer_by_name,
        )
        self.mlp_post_norm = make_norm(config) if config.post_norms else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "#B T"] | None = None,
        window: int | None = None,
        cache: KVCache | None = None,
        context: Context = Context(),
    ) -> Any:
        """Return the residual stream after this block; with a cache, the pair (stream, new cache)."""
        settings = {"positions": positions, "segments": segments, "window": window, "context": context}
        attention_result = self.attention(self.attention_norm(x), cache=cache, **settings)
        y, cache = (attention_result, None) if cache is None else attention_result
        y = y if self.attention_post_norm is None else self.attention_post_norm(y)
        x = constrain(x + y, "batch", "seq", "embed")
        y = self.mlp(self.mlp_norm(x), context=context)
        y = y if self.mlp_post_norm is None else self.mlp_post_norm(y)
        x = constrain(x + y, "batch", "seq", "embed")
        return x if cache is None else (x, cache)


class DecoderModule(nnx.Module):
    """Maps tokens to the logits of the tokens that follow them.

    Args:
        config: the model value.
        vocab_multiple: the tables of the embedding and the head are padded to a multiple of this number of rows.
        rngs: random streams; the weights are drawn from `params`.

    Attributes:
        positions: table of learned positions; `None` unless the model has learned positions.
        head: table of the output projection; `None` if the model uses the table of the embedding instead.

    Example:
        >>> tiny = Decoder(vocab=5, context=8, layers=2, embed=8, heads=2)
        >>> module = tiny.build(nnx.Rngs(0), vocab_multiple=4)
        >>> tokens = jnp.array([[1, 2, 3]])
        >>> module(tokens).shape, module.embedding.weight.shape
        ((1, 3, 8), (8, 8))
        >>> prompt_logits, cache = module(tokens[:, :2], cache=tiny.init_cache(1, 8, jnp.float32))
        >>> next_logits, cache = module(tokens[:, 2:], cache=cache)
        >>> bool(jnp.allclose(next_logits[:, 0], module(tokens)[:, 2], atol=1e-5))
        True
    """

    def __init__(self, config: Decoder, *, vocab_multiple: int = 1, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.init_std)
        table_settings = {"vocab_multiple": vocab_multiple, "init": init, "rngs": rngs}
        self.config = config
        self.embedding = Embedding(config.vocab, config.embed, **table_settings)
        has_learned_positions = config.positions == "learned"
        self.positions = (
            PositionTable(config.context, config.embed, init=init, rngs=rngs) if has_learned_positions else None
        )
        self.dropout = Dropout(config.dropout, site="embedding")
        self.blocks = Stack(lambda rngs: Block(config, rngs), config.layers, rngs=rngs)
        self.norm = make_norm(config)
        self.head = None if config.tied else Embedding(config.vocab, config.embed, **table_settings)

    def embed(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        cache: KVCache | None = None,
        context: Context = Context(),
    ) -> Float[Array, "B T D"]:
        """Return the input of the first block: embedded tokens, plus learned positions if the model has them."""
        x = self.embedding.lookup(tokens, context.dtype)
        if self.config.embedding_scale:
            x = x * jnp.asarray(math.sqrt(self.config.embed), x.dtype)
        if self.positions is not None:
            x = x + self._position_rows(self.positions, tokens.shape[1], positions, cache).astype(x.dtype)
        return constrain(self.dropout(x, context), "batch", "seq", "embed")

    def _position_rows(self, table: PositionTable, length: int, positions: Any, cache: KVCache | None) -> Any:
        """Return the rows of the position table for `length` tokens, (1 or B, T, D)."""
        if length > self.config.context:
            raise UserError(
                f"sequence: got {length} tokens, expected at most {self.config.context} (learned positions); shorten it"
            )
        if positions is None and cache is None:
            return table.weight[:length][None, :, :]
        if positions is None:
            assert cache is not None
            positions = cache.length[0] + jnp.arange(length)[None, :]
        return table.lookup(positions)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "#B T"] | None = None,
        cache: KVCache | None = None,
        context: Context = Context(),
    ) -> Any:
        """Return the normed residual stream (B, T, D) after all blocks; with a cache, the pair (stream, new cache)."""
        x = self.embed(tokens, positions=positions, cache=cache, context=context)
        settings = {"positions": positions, "segments": segments, "context": context, "cycle": self.block_cycle}
        if cache is None:
            return self.norm(self.blocks(x, **settings))
        x, cache = self.blocks(x, per_layer={"cache": cache}, outputs=True, **settings)
        return self.norm(x), cache

    @property
    def block_cycle(self) -> list[dict[str, Any]]:
        """Keyword arguments of each block of a cycle, in which blocks may differ. The cycle repeats over the blocks."""
        return [{"window": window} for window in self.config.windows]

    @property
    def table(self) -> Array:
        """Table of the output projection, (padded V, D): that of the head, or of the embedding if the two are tied."""
        return (self.embedding if self.head is None else self.head).weight[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the float32 logits of the next token: minus infinity in the columns that pad the vocabulary."""
        next_logits = logits(hidden, self.table, vocab=self.config.vocab, soft_cap=self.config.final_soft_cap)
        return constrain(next_logits, "batch", "inner_seq", "vocab")

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "#B T"] | None = None,
        cache: KVCache | None = None,
        context: Context = Context(),
    ) -> Any:
        """Return the logits of each token's successor, (B, T, padded V); with a cache, the pair (logits, new cache).

        Args:
            tokens: ids of the tokens.
            positions: positions of the tokens in their documents. By default, these are the indices in the row or, with
                a cache, the positions that follow the cached ones.
            segments: index of each token's document within the row, counted from 1; 0 is padding.
            cache: keys and values of earlier tokens (`Decoder.init_cache`).
            context: context of the forward pass, with the key, the compute dtype and the implementations.
        """
        settings = {"positions": positions, "segments": segments, "cache": cache, "context": context}
        if cache is None:
            return self.logits(self.hidden(tokens, **settings))
        hidden, cache = self.hidden(tokens, **settings)
        return self.logits(hidden), cache


def decoder_loss(module: DecoderModule, batch: Batch, context: Context) -> Loss:
    """Return the summed cross-entropy of a batch, as `Decoder.loss` documents."""
    check_batch(batch, ("tokens", "targets"), "a decoder")
    settings = {"positions": batch.get("positions"), "segments": batch.get("segments"), "context": context}
    weights = batch.get("weights")
    if weights is not None and jnp.ndim(weights) == 1:  # one weight for each row
        weights = jnp.broadcast_to(jnp.asarray(weights)[:, None], batch["targets"].shape)
    return cross_entropy(
        module.hidden(batch["tokens"], **settings),
        module.table,
        batch["targets"],
        weights,
        vocab=module.config.vocab,
        chunk=context.loss_chunk,
        z_loss=module.config.z_loss,
        soft_cap=module.config.final_soft_cap,
        implementation=context.loss,
    )


def init_cache(config: Decoder, batch: int, length: int, dtype: Any) -> KVCache:
    """Return an empty cache for all layers, as `Decoder.init_cache` documents."""
    return KVCache.empty(batch, length, config.kv_count, config.head_width, dtype, layers=config.layers)
