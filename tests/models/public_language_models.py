"""Language models in the shapes of public ones, with the parts and the data that other models take from here."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

nnx.use_eager_sharding(False)
ROWS, LENGTH, VOCAB, WIDTH, HEADS = 8, 6, 12, 8, 2


# -- data --------------------------------------------------------------------------------------------------------------


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def integers(high, *shape, seed=1):
    return np.random.default_rng(seed).integers(0, high, (ROWS, *shape)).astype("int32")


def pictures(size=8, channels=3):
    return {"images": numbers(size, size, channels), "labels": integers(5)}


def text():
    return {"tokens": integers(VOCAB, LENGTH), "targets": integers(VOCAB, LENGTH, seed=2)}


# -- parts -------------------------------------------------------------------------------------------------------------


def causal(length=LENGTH):
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


class Mlp(nnx.Module):
    def __init__(self, width, rngs, act=nnx.gelu):
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)
        self.act = act

    def __call__(self, x):
        return self.down(self.act(self.up(x)))


class EncoderBlock(nnx.Module):
    """Pre-norm attention and MLP with dropout, as in ViT and lm1b."""

    def __init__(self, rngs, rate=0.0, mlp=Mlp, reads_memory=False):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp, self.dropout = mlp(WIDTH, rngs), nnx.Dropout(rate, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs) if reads_memory else None

    def __call__(self, x, mask=None, memory=None):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        if self.cross is not None:
            x = x + self.cross(x, memory)
        return x + self.dropout(self.mlp(self.norm2(x)))


# -- language ----------------------------------------------------------------------------------------------------------


class Lm1b(nnx.Module):
    """Flax's lm1b: numbered blocks, padding mask, learned positions, tied logits."""

    def __init__(self, rngs, depth=4):
        self.embed, self.depth = nnx.Embed(VOCAB, WIDTH, rngs=rngs), depth
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, LENGTH, WIDTH)))
        for index in range(depth):
            setattr(self, f"encoderdecoderblock_{index}", EncoderBlock(rngs))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        mask = nnx.combine_masks(causal(), nnx.make_attention_mask(tokens >= 0, tokens >= 0))
        x = self.embed(tokens) + self.positions[...]
        for index in range(self.depth):
            x = getattr(self, f"encoderdecoderblock_{index}")(x, mask)
        return self.embed.attend(self.norm(x))


class GemmaBlock(nnx.Module):
    """RMS norms, rotary positions, one head of keys and values, a gated MLP, and a sown value."""

    def __init__(self, rngs):
        self.pre, self.post = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q = nnx.Einsum("bsd,dnh->bsnh", (WIDTH, HEADS, 4), rngs=rngs)
        self.kv = nnx.Einsum("bsd,cdh->cbsh", (2, WIDTH, 4), rngs=rngs)
        self.out = nnx.Einsum("bsnh,nhd->bsd", (HEADS, 4, WIDTH), rngs=rngs)
        self.gate, self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, angles, mask):
        h = self.pre(x)
        (k, v), q = self.kv(h), rotate(self.q(h), angles[:, :, None])
        logits = jnp.einsum("bsnh,bth->bnst", q, rotate(k, angles))
        probabilities = jax.nn.softmax(jnp.where(mask, logits, -1e30))
        self.sow(nnx.Intermediate, "probabilities", probabilities)
        x = x + self.out(jnp.einsum("bnst,bth->bsnh", probabilities, v))
        h = self.post(x)
        return x + nnx.gelu(self.gate(h)) * self.mlp(h)


def rotate(x, angles):
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * jnp.cos(angles) - second * jnp.sin(angles), second * jnp.cos(angles) + first * jnp.sin(angles)], -1
    )


class Gemma(nnx.Module):
    def __init__(self, rngs, depth=4):
        self.embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([GemmaBlock(rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        angles = jnp.arange(LENGTH, dtype="float32")[None, :, None] * jnp.array([1.0, 0.1])[None, None]
        x = self.embedder(tokens) * jnp.sqrt(float(WIDTH))
        for layer in self.layers:
            x = layer(x, angles, causal())
        return 30.0 * jnp.tanh(self.embedder.attend(self.norm(x)) / 30.0)


class Experts(nnx.Module):
    """The two best of four experts for each token, all computed."""

    def __init__(self, width, rngs):
        self.router = nnx.Linear(width, 4, rngs=rngs)
        self.up = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, width, 2 * width)))
        self.down = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, 2 * width, width)))

    def __call__(self, x):
        gates, experts = jax.lax.top_k(jax.nn.softmax(self.router(x)), 2)
        weights = jnp.sum(jax.nn.one_hot(experts, 4) * gates[..., None], axis=-2)
        hidden = jax.nn.relu(jnp.einsum("bsd,edf->bsef", x, self.up[...]))
        return jnp.einsum("bsef,efd,bse->bsd", hidden, self.down[...], weights)


class Mixtral(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.layers = nnx.List([EncoderBlock(rngs, mlp=Experts) for _ in range(4)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, causal())
        return self.head(x)


class Scanned(nnx.Module):
    """Blocks whose parameters are stacked by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs, depth=3):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        make = nnx.vmap(lambda rngs: Mlp(WIDTH, rngs))
        self.layers = nnx.split_rngs(splits=depth)(make)(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + layer(x)

        return self.head(run(self.embed(tokens), self.layers))


class ScannedBlock(nnx.Module):
    """A block with dropout, whose projection has axis names."""

    def __init__(self, rngs, rate=0.0):
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.norm, self.dropout = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Dropout(rate, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=split, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        return x + self.down(self.dropout(nnx.gelu(self.up(self.norm(x))))) * mask


class ScannedRemat(nnx.Module):
    """Blocks of a user who recomputes them, and names the dim of the layers."""

    def __init__(self, rngs, depth=4, rate=0.0, name="layers", vocab=VOCAB):
        self.embed, self.head = nnx.Embed(vocab, WIDTH, rngs=rngs), nnx.Linear(WIDTH, vocab, rngs=rngs)
        metadata = {} if name is None else {"transform_metadata": {nnx.PARTITION_NAME: name}}
        make = nnx.vmap(lambda rngs: ScannedBlock(rngs, rate), **metadata)
        self.blocks = nnx.split_rngs(splits=depth)(make)(rngs)

    def __call__(self, tokens):
        mask = (tokens > 3)[..., None].astype(jnp.float32)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block):
            return block(x, mask)

        return self.head(run(self.embed(tokens), self.blocks))


class ScannedPytree(ScannedRemat):
    """The module itself is scanned by `jax.lax.scan`, beside a number for each layer, and with a counter."""

    def __call__(self, tokens):
        def run(carry, layer):
            (x, count), (block, rate) = carry, layer
            return (x + rate * (block(x, 1.0) - x), count + 1), None

        rates = jnp.linspace(1.0, 0.5, 4)
        (x, count), _ = jax.lax.scan(run, (self.embed(tokens), jnp.int32(0)), (self.blocks, rates))
        return self.head(x / count)


class Wmt(nnx.Module):
    """An encoder and a decoder that reads the encoder's result in each block."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.encoder = nnx.List([EncoderBlock(rngs) for _ in range(2)])
        self.decoder = nnx.List([EncoderBlock(rngs, reads_memory=True) for _ in range(2)])

    def __call__(self, tokens):
        memory = self.embed(tokens[:, ::-1])
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed(tokens)
        for layer in self.decoder:
            x = layer(x, causal(), memory)
        return self.embed.attend(x)


class CharRnn(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, tokens):
        return self.head(self.rnn(self.embed(tokens)))


class LinearRecurrence(nnx.Module):
    """A state-space block: a diagonal recurrence by an associative scan."""

    def __init__(self, rngs):
        self.norm, self.inputs = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.decay = nnx.Param(jnp.linspace(0.0, 2.0, WIDTH))

    def __call__(self, x):
        h = self.inputs(self.norm(x))
        decay = jnp.broadcast_to(jax.nn.sigmoid(self.decay[...]), h.shape)
        _, states = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, h), axis=1)
        return x + nnx.silu(states)


class StateSpace(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.layers = nnx.Sequential(*[LinearRecurrence(rngs) for _ in range(4)])

    def __call__(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


class NanoDo(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB, WIDTH)(tokens)
        for _ in range(2):
            x = x + linen.MultiHeadDotProductAttention(HEADS)(linen.LayerNorm()(x), mask=causal())
            x = x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x))))
        return linen.Dense(VOCAB)(x)


class LinenBlock(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, mask, train):
        h = linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
        h = linen.Dropout(self.rate, deterministic=not train)(h)
        split = linen.with_partitioning(linen.initializers.lecun_normal(), ("mlp", "embed"))
        return x + linen.Dense(WIDTH, kernel_init=split)(h) * mask


class LinenLoop(linen.Module):
    """Blocks in a Python loop."""

    rate: float = 0.0
    vocab: int = VOCAB

    @linen.compact
    def __call__(self, tokens, train):
        x, mask = linen.Embed(self.vocab, WIDTH)(tokens), (tokens > 3)[..., None].astype(jnp.float32)
        for _ in range(4):
            x = LinenBlock(self.rate)(x, mask, train=train)
        return linen.Dense(self.vocab)(x)


class LinenLayer(linen.Module):
    rate: float
    train: bool

    @linen.compact
    def __call__(self, x, _):
        return LinenBlock(self.rate)(x, 1.0, train=self.train), None


class LinenScan(linen.Module):
    """Blocks in `linen.scan`, recomputed by the user."""

    rate: float = 0.0

    @linen.compact
    def __call__(self, tokens, train):
        layers = linen.scan(
            linen.remat(LinenLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=4,
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        x, _ = layers(self.rate, train, name="layers")(linen.Embed(VOCAB, WIDTH)(tokens), None)
        return linen.Dense(VOCAB)(x)


class Sst2(nnx.Module):
    """A classifier of texts of several lengths, by a bidirectional LSTM."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.forward, self.backward = (nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs)) for _ in range(2))
        self.head = nnx.Linear(2 * WIDTH, 2, rngs=rngs)

    def __call__(self, tokens, lengths):
        x = self.embed(tokens)
        is_token = (jnp.arange(LENGTH)[None] < lengths[:, None])[..., None]
        h = jnp.concatenate([self.forward(x), self.backward(x[:, ::-1])[:, ::-1]], -1) * is_token
        return self.head(h.sum(1) / lengths[:, None].astype(h.dtype))


class Bert(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.norm = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.encoder = nnx.List([EncoderBlock(rngs) for _ in range(4)])
        self.bias = nnx.Param(jnp.zeros((1, 1, VOCAB)))

    def __call__(self, tokens):
        x = self.norm(self.embed(tokens))
        for layer in self.encoder:
            x = layer(x)
        return self.embed.attend(x) + self.bias[...]


class Selective(nnx.Module):
    """A selective state space: a causal convolution per channel, and a scan whose decay depends on the token."""

    def __init__(self, rngs, states=3):
        inner, self.states = 2 * WIDTH, states
        self.inputs = nnx.Linear(WIDTH, 2 * inner, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(inner, inner, (3,), padding="CAUSAL", feature_group_count=inner, rngs=rngs)
        self.selection = nnx.Linear(inner, 1 + 2 * states, use_bias=False, rngs=rngs)
        self.rate = nnx.Linear(1, inner, rngs=rngs)
        self.log_decay = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, 1 + states), (inner, 1))))
        self.skip = nnx.Param(jnp.ones(inner))
        self.outputs = nnx.Linear(inner, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x, gate = jnp.split(self.inputs(x), 2, axis=-1)
        x = nnx.silu(self.conv(x))
        rate, write, read = jnp.split(self.selection(x), [1, 1 + self.states], axis=-1)
        rate = nnx.softplus(self.rate(rate))[..., None]
        decays = jnp.exp(-rate * jnp.exp(self.log_decay[...])[None, None])
        writes = rate * write[:, :, None, :] * x[..., None]

        def combine(earlier, later):
            return earlier[0] * later[0], later[0] * earlier[1] + later[1]

        _, states = jax.lax.associative_scan(combine, (decays, writes), axis=1)
        y = jnp.einsum("btdn,btn->btd", states, read) + self.skip[...][None, None] * x
        return self.outputs(y * nnx.silu(gate))


class Mamba(nnx.Module):
    """The module adds up the residual stream itself, from a list of norms and one of layers."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(4)])
        self.layers = nnx.List([Selective(rngs) for _ in range(4)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.embed.attend(self.norm(x))
