"""The default experiment's model and step by hand: pure functions, optax, one jit. What jaxscale is measured against.

Same model, same clip, same skip of non-finite steps, same norm and loss as `experiments/shakespeare.py`; nothing else.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

VOCAB, CONTEXT, LAYERS, HEADS, EMBED, BATCH, STEPS = 66, 64, 4, 4, 128, 12, 2000


def init(seed: int = 0, layers: int = LAYERS) -> dict[str, Any]:
    """Parameters as nested dicts; those of the blocks stacked over layers."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))

    def normal(*shape: int, std: float = 0.02) -> jax.Array:
        return std * jax.random.normal(next(keys), shape)

    small = 0.02 / math.sqrt(2 * layers)
    return {
        "embedding": normal(VOCAB, EMBED),
        "position": normal(CONTEXT, EMBED),
        "norm": jnp.ones(EMBED),
        "blocks": {
            "norm1": jnp.ones((layers, EMBED)),
            "q": normal(layers, EMBED, EMBED),
            "k": normal(layers, EMBED, EMBED),
            "v": normal(layers, EMBED, EMBED),
            "out": normal(layers, EMBED, EMBED, std=small),
            "norm2": jnp.ones((layers, EMBED)),
            "up": normal(layers, EMBED, 4 * EMBED),
            "down": normal(layers, 4 * EMBED, EMBED, std=small),
        },
    }


def layer_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """LayerNorm without a bias."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * gain


def block(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """Attention and mlp, before each a norm."""
    b, t, d = x.shape
    h = layer_norm(x, p["norm1"])
    q, k, v = ((h @ p[name]).reshape(b, t, HEADS, d // HEADS) for name in ("q", "k", "v"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(d // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
    attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v).reshape(b, t, d)
    x = x + attended @ p["out"]
    return x + jax.nn.gelu(layer_norm(x, p["norm2"]) @ p["up"], approximate=False) @ p["down"]


def loss_fn(params: dict[str, Any], batch: dict[str, jax.Array], unroll: int = 1) -> jax.Array:
    """Mean nats per target."""
    x = params["embedding"][batch["tokens"]] + params["position"]
    x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["blocks"], unroll=unroll)
    logits = layer_norm(x, params["norm"]) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def make_optimizer() -> optax.GradientTransformation:
    """AdamW with warm-up and cosine, clipped."""
    rate = schedule()

    def mask(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path[-1]), params)

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, 0.9, 0.99, weight_decay=0.1, mask=mask))


def schedule() -> optax.Schedule:
    """1e-3 after 100 steps of warm-up, then a cosine to 1e-4."""
    warm = optax.linear_schedule(1e-3 / 101, 1e-3, 100)
    return optax.join_schedules([warm, optax.cosine_decay_schedule(1e-3, STEPS - 100, 0.1)], [100])


def make_step(devices: list[Any], unroll: int = 1) -> tuple[Any, Any, NamedSharding]:
    """(init, step, sharding of a batch): data parallel over `devices`, state donated."""
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    optimizer, rate = make_optimizer(), schedule()

    @functools.partial(jax.jit, out_shardings=whole)
    def start() -> Any:
        params = init()
        return params, optimizer.init(params), jnp.zeros((), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0, in_shardings=(whole, rows), out_shardings=(whole, whole))
    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        params, opt, count = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, unroll)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, new_opt = optimizer.update(grads, opt, params)
        new = (optax.apply_updates(params, updates), new_opt, count + 1)
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new[:2], (params, opt))
        return (*kept, new[2]), {"loss": loss, "grad_norm": norm, "learning_rate": rate(count)}

    return start, step, rows
