"""Decoder: a decoder-only transformer as a value; its fields make it a Llama, a GPT-2, a Qwen3 or a Gemma-2.

Each field is one independent choice. The choices come from the papers on Llama (arXiv:2302.13971, 2407.21783), GPT-2
(Radford et al., 2019), Qwen3 (arXiv:2505.09388) and Gemma 2 (arXiv:2408.00118). Left out: experts, cross-attention,
attention with compressed keys or with keys shared across layers, dropout of attention weights. The module that a
Decoder builds is in `decoder_module.py`; this file imports neither JAX nor Flax, so that a mistyped field is reported
at once.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

from jaxscale.errors import UserError
from jaxscale.models.field_checks import check_counts, check_positive, check_rates
from jaxscale.values import check_types
from jaxscale.values.limits import MAX_INT32, check_at_most
from jaxscale.values.short_repr import short_repr

if TYPE_CHECKING:
    import numpy as np
    from flax import nnx

    from jaxscale.blocks import Context, Loss
    from jaxscale.models.decoder_module import DecoderModule
    from jaxscale.typing import Batch

MlpKind = Literal["swiglu", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "relu", "relu_squared", "silu"]
GATED_KINDS = frozenset({"swiglu", "geglu", "geglu_tanh", "reglu"})
"""Kinds of MLP in which the activation of a gate multiplies the values."""


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's change of the rotary frequencies for a longer context: it divides low frequencies.

    Args:
        factor: divisor of the low frequencies.
        low_freq_factor: frequencies with a wavelength above original_context / low_freq_factor are divided by `factor`.
        high_freq_factor: frequencies with a wavelength below original_context / high_freq_factor stay unchanged;
            frequencies between the two wavelengths are interpolated.
        original_context: context of the original training, in positions.

    References:
        "The Llama 3 Herd of Models", arXiv:2407.21783; transformers, modeling_rope_utils.py,
        `_compute_llama3_parameters`.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        check_types(self)
        field_names = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
        check_positive(self, field_names, "rotary_scaling.")
        check_counts(self, ("original_context",))
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rotary_scaling: got low_freq_factor {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}, expected high_freq_factor to be greater; swap them"
            )

    def __call__(self, frequencies: "np.ndarray") -> "np.ndarray":
        """Return the scaled frequencies, in radians per position."""
        turns_in_context = self.original_context * frequencies / (2 * math.pi)
        unscaled_share = (turns_in_context - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unscaled_share = unscaled_share.clip(0.0, 1.0)
        return unscaled_share * frequencies + (1 - unscaled_share) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer.

    Args:
        vocab: size of the vocabulary.
        context: largest number of positions of a sequence.
        layers: number of blocks.
        embed: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads, each shared by heads / kv_heads query heads; `None` means as many as
            query heads.
        head_dim: width of a head; `None` means embed / heads.
        mlp: hidden width of the feed-forward layers; `None` means 4 * embed.
        norm: "rms", "layer", or "layer_no_bias" (a LayerNorm without a bias).
        norm_plus_one: whether the stored weight of a norm is its gain minus one, as in Gemma.
        norm_eps: constant added to the variance in norms.
        post_norms: whether the outputs of attention and mlp are normed before they are added to the stream (Gemma-2).
        mlp_kind: "swiglu", "geglu", "geglu_tanh" and "reglu" are f(x W_gate) * (x W_up), where f is, in this order, the
            SiLU, the GELU, the tanh approximation of the GELU, and the ReLU. "silu", "gelu", "gelu_tanh", "relu" and
            "relu_squared" are f(x W_up).
        positions: "rotary", "learned" (a table added to the embeddings), or "none".
        rotary_base: base of the rotary wavelengths, which grow up to 2 pi * rotary_base positions.
        rotary_scaling: Llama 3.1's change of the rotary frequencies; `None` leaves them unchanged.
        tied: whether the output projection is the transposed embedding.
        attention_bias: whether the projections of attention have biases; "qkv" for all but the output projection.
        mlp_bias: whether the feed-forward layers have biases.
        qk_norm: whether each head of queries and keys has an RMSNorm (Qwen3).
        attention_soft_cap: cap of the attention scores s, which become cap * tanh(s / cap); `None` for no cap.
        final_soft_cap: cap of the logits z, which become cap * tanh(z / cap); `None` for no cap.
        windows: number of most recent positions that each layer sees, `None` for all. The tuple repeats over the
            layers, so (4096, None) limits every other layer.
        embedding_scale: whether embeddings are multiplied by sqrt(embed) (Gemma).
        attention_scale: factor of the attention scores; `None` means 1 / sqrt(head_dim).
        dropout: rate of dropout after the embedding and where attention and mlp are added to the residual stream.
        z_loss: weight of the penalty (log Z)^2, where Z is the sum of exp(logit). The penalty is added to the trained
            loss but not to the reported one.
        init_std: standard deviation of the initial weights.
        scaled_init: whether the initial weights of projections into the residual stream are divided by sqrt(2 * layers)
            (GPT-2).

    Raises:
        UserError: a field is out of range, or two fields are incompatible.

    Example:
        >>> small = Decoder(vocab=256, context=64, layers=2, embed=64, heads=4, kv_heads=2)
        >>> small.mlp_width, small.head_width, small.parameters
        (256, 16, 155968)
        >>> Decoder(vocab=256, heads=5)
        Traceback (most recent call last):
        jaxscale.errors.UserError: heads: got 5, expected a divisor of embed 768; change one, or give head_dim
    """

    vocab: int
    context: int = 1024
    layers: int = 12
    embed: int = 768
    heads: int = 12
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp: int | None = None
    norm: Literal["rms", "layer", "layer_no_bias"] = "rms"
    norm_plus_one: bool = False
    norm_eps: float = 1e-5
    post_norms: bool = False
    mlp_kind: MlpKind = "swiglu"
    positions: Literal["rotary", "learned", "none"] = "rotary"
    rotary_base: float = 10_000.0
    rotary_scaling: Llama3Scaling | None = None
    tied: bool = False
    attention_bias: bool | Literal["qkv"] = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    windows: tuple[int | None, ...] = (None,)
    embedding_scale: bool = False
    attention_scale: float | None = None
    dropout: float = 0.0
    z_loss: float = 0.0
    init_std: float = 0.02
    scaled_init: bool = True

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, ("vocab", "context", "layers", "embed", "heads", "kv_heads", "head_dim", "mlp"))
        positive_field_names = (
            "norm_eps",
            "rotary_base",
            "attention_soft_cap",
            "final_soft_cap",
            "attention_scale",
            "init_std",
        )
        check_positive(self, positive_field_names)
        check_rates(self, ("dropout",))
        if not (self.z_loss >= 0 and math.isfinite(self.z_loss)):
            raise UserError(f"z_loss: got {self.z_loss!r}, expected a weight >= 0 (1e-4 is usual)")
        if self.head_dim is None and self.embed % self.heads:
            raise UserError(
                f"heads: got {self.heads}, expected a divisor of embed {self.embed}; change one, or give head_dim"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise UserError(f"kv_heads: got {self.kv_heads}, expected a divisor of heads {self.heads}")
        if self.positions == "rotary" and self.head_width % 2:
            raise UserError(f"head_dim: got {self.head_width}, expected an even number for rotary positions")
        if self.rotary_scaling is not None and self.positions != "rotary":
            raise UserError(
                f"rotary_scaling: got positions {self.positions!r}, expected 'rotary'; leave rotary_scaling out"
            )
        if self.norm_plus_one and self.norm != "rms":
            raise UserError(f"norm_plus_one: got norm {self.norm!r}, expected 'rms'; leave norm_plus_one out")
        if not self.windows:
            raise UserError("windows: got (), expected at least one entry; give (None,) to see all positions")
        for window in self.windows:
            if window is not None and window < 1:
                raise UserError(
                    f"windows: got {window!r} in {self.windows}, expected a number of positions >= 1, or None for all"
                )
            check_at_most("windows", window or 0, MAX_INT32)
        if len(self.windows) > self.layers:
            raise UserError(
                f"windows: got {len(self.windows)} entries, expected at most one for each of the {self.layers} layers"
            )

    @property
    def head_width(self) -> int:
        """Width of a head: `head_dim`, or embed / heads if `head_dim` is `None`."""
        return self.head_dim or self.embed // self.heads

    @property
    def kv_count(self) -> int:
        """Number of key and value heads: `kv_heads`, or `heads` if `kv_heads` is `None`."""
        return self.kv_heads or self.heads

    @property
    def mlp_width(self) -> int:
        """Hidden width of a feed-forward layer: `mlp`, or 4 * embed if `mlp` is `None`."""
        return self.mlp or 4 * self.embed

    @property
    def parameters(self) -> int:
        """Number of trained parameters, without padding of the vocabulary."""
        norm_parameters = self.embed * (2 if self.norm == "layer" else 1)
        query_width, key_width = self.heads * self.head_width, self.kv_count * self.head_width
        attention_parameters = self.embed * (2 * query_width + 2 * key_width) + 2 * self.head_width * self.qk_norm
        attention_parameters += (query_width + 2 * key_width) * bool(self.attention_bias)
        attention_parameters += self.embed * (self.attention_bias is True)
        input_projection_count = 2 if self.mlp_kind in GATED_KINDS else 1
        mlp_parameters = (1 + input_projection_count) * self.embed * self.mlp_width
        mlp_parameters += (input_projection_count * self.mlp_width + self.embed) * self.mlp_bias
        block_parameters = attention_parameters + mlp_parameters + (4 if self.post_norms else 2) * norm_parameters
        table_row_count = self.vocab * (1 if self.tied else 2) + self.context * (self.positions == "learned")
        return self.layers * block_parameters + norm_parameters + table_row_count * self.embed

    def logical_sizes(self) -> dict[str, int]:
        """Return the sizes that mesh axes must divide, by logical axis. The vocabulary is padded instead."""
        return {"heads": self.heads, "kv_heads": self.kv_count, "mlp": self.mlp_width, "embed": self.embed}

    def build(self, rngs: "nnx.Rngs", *, vocab_multiple: int = 1) -> "DecoderModule":
        """Build the NNX module. The vocabulary dim of its parameters is padded to a multiple of `vocab_multiple`."""
        from jaxscale.models.decoder_module import DecoderModule

        return DecoderModule(self, vocab_multiple=vocab_multiple, rngs=rngs)

    def loss(self, module: "DecoderModule", batch: "Batch", context: "Context") -> "Loss":
        """Return the summed cross-entropy of a batch's targets, computed `context.loss_chunk` positions at a time.

        Args:
            module: the result of `build`, or a copy with other parameters.
            batch: int32 `tokens` and `targets` [B, T]; optionally `positions`, `segments`, and float32 `weights`, which
                are those of the targets [B, T] or of the rows [B].
            context: context of the forward pass, with the key, the compute dtype and the implementations.
        """
        from jaxscale.models.decoder_module import decoder_loss

        return decoder_loss(module, batch, context)

    def init_cache(self, batch: int, length: int, dtype: Any) -> Any:
        """Make an empty KV cache of `length` positions for `batch` rows, which `module(tokens, cache=...)` fills."""
        from jaxscale.models.decoder_module import init_cache

        return init_cache(self, batch, length, dtype)
