"""Large batches: 32 times the batch in a 32nd of the updates, and which rules keep the accuracy.

    python experiments/large_batch_digits.py [--seeds 0 1 2] [--tiny]

1,347 handwritten digits of 8 x 8 pixels (0 to 1), each shifted by -1, 0 or 1 pixels along both dims: 12,123 images, and
450 held out. A perceptron 64-128-128-128-10, 8 epochs: 3,024 updates of 32 images or 88 of 1,024; "warmed up" is over a
fifth of them (LARS: a twentieth, but at the linear rate), and every rate falls to 0 along a cosine. Weight decay 1e-4
(LARS) and 0.01 (LAMB) of matrices alone.

On XLA:CPU, JAX 0.12.0.1, seeds 0, 1 and 2, 22 November 2026, it gave

    sgd 32                            98.59 +-  0.38 %
    sgd 1024, rate unscaled           90.89 +-  2.23 %
    sgd 1024, linear                  25.93 +- 23.02 %
    sgd 1024, linear, warmed up       34.96 +- 27.71 %
    sgd 1024, sqrt, warmed up         96.15 +-  0.38 %
    lars 1024, warmed up              97.70 +-  0.21 %
    lars 1024, linear, warmed up      97.26 +-  0.46 %
    adam 32                           98.07 +-  0.46 %
    adam 1024, rate unscaled          89.41 +-  2.64 %
    adam 1024, linear, warmed up      97.78 +-  0.18 %
    adam 1024, sqrt, warmed up        96.81 +-  0.82 %
    lamb 1024, warmed up              98.15 +-  0.28 %
    lamb 32                           98.74 +-  0.64 %

Linear scaling alone diverges, warmed up or not. LARS at a rate of 0.7 and warmed up over a twentieth loses 0.9 points,
LAMB 0.4; both are held to 1.5. The rate and its warm-up were chosen on seeds 0 to 5; on 6 to 11 they lose 1.4 (SGD
98.78, LARS 97.37), and the linear rate warmed up over a fifth loses 2.1 (96.70). Gains and biases at the full rate, in
place of rate times trust, lose another 0.8. On 450 images a tenth of a point means nothing; Adam does as well.
"""

import argparse
import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxscale import Optimizer
from jaxscale.optim import leaves_of, scaled

DIGITS = Path(__file__).parent / "data" / "digits.npz"
TRAINED = 1347
SMALL, LARGE = 32, 1024
RATIO = LARGE // SMALL
EPOCHS = 8
WITHIN, DIVERGED = 1.5, 90.0
"""Points that large batches may lose, and the accuracy that a run which diverges stays under."""
WIDTHS = (64, 128, 128, 128, 10)

SGD = Optimizer(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=0.0, final_learning_rate=0.0, clip=None)
ADAM = dataclasses.replace(SGD, name="adamw", learning_rate=1e-3, momentum=None, b2=0.999)
LARS = Optimizer(name="lars", learning_rate=0.7, trust=0.02, final_learning_rate=0.0, clip=None)
LAMB = Optimizer(name="lamb", learning_rate=0.05, final_learning_rate=0.0, clip=None)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    Args:
        name: in the table.
        optimizer: with its learning rate at this batch.
        batch: images.
        warmed: share of the updates that is linear warm-up.
    """

    name: str
    optimizer: Optimizer
    batch: int
    warmed: float = 0.0


WAYS = (
    Way("sgd 32", SGD, SMALL),
    Way("sgd 1024, rate unscaled", SGD, LARGE),
    Way("sgd 1024, linear", scaled(SGD, RATIO), LARGE),
    Way("sgd 1024, linear, warmed up", scaled(SGD, RATIO), LARGE, 0.2),
    Way("sgd 1024, sqrt, warmed up", scaled(SGD, RATIO, "sqrt"), LARGE, 0.2),
    Way("lars 1024, warmed up", LARS, LARGE, 0.05),
    Way("lars 1024, linear, warmed up", dataclasses.replace(LARS, learning_rate=1.6), LARGE, 0.2),
    Way("adam 32", ADAM, SMALL),
    Way("adam 1024, rate unscaled", ADAM, LARGE),
    Way("adam 1024, linear, warmed up", scaled(ADAM, RATIO), LARGE, 0.2),
    Way("adam 1024, sqrt, warmed up", scaled(ADAM, RATIO, "sqrt"), LARGE, 0.2),
    Way("lamb 1024, warmed up", LAMB, LARGE, 0.2),
    Way("lamb 32", dataclasses.replace(LAMB, learning_rate=0.004), SMALL, 0.05),
)


def images() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images (N, 64) and classes (N,), to train on and held out."""
    data = np.load(DIGITS)
    order = np.random.default_rng(0).permutation(len(data["x"]))
    x, y = data["x"][order].reshape(-1, 8, 8).astype(np.float32) / 16, data["y"][order].astype(np.int32)
    padded = np.pad(x[:TRAINED], ((0, 0), (1, 1), (1, 1)))
    shifted = [padded[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    train = np.concatenate(shifted).reshape(-1, 64)
    return train, np.tile(y[:TRAINED], 9), x[TRAINED:].reshape(-1, 64), y[TRAINED:]


def start(seed: int) -> Any:
    """Weights with variance 2 / n, the last ones half as large, and zero biases."""
    params, keys = {}, jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
    for layer, (key, rows, columns) in enumerate(zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)):
        gain = math.sqrt(2 / rows) * (0.5 if columns == WIDTHS[-1] else 1.0)
        params[f"weight{layer}"] = gain * jax.random.normal(key, (rows, columns))
        params[f"bias{layer}"] = jnp.zeros(columns)
    return params


def logits(params: Any, x: jax.Array) -> jax.Array:
    """Of the perceptron."""
    x = (x - 0.3) * 2
    for layer in range(len(WIDTHS) - 1):
        x = x @ params[f"weight{layer}"] + params[f"bias{layer}"][None]
        x = x if layer == len(WIDTHS) - 2 else jax.nn.relu(x)
    return x


def train(way: Way, seed: int, epochs: int, data: Any) -> float:
    """Share of held-out images that are right in the end."""
    x, y, held_x, held_y = data
    per_epoch = len(x) // way.batch
    steps = epochs * per_epoch
    optimizer = dataclasses.replace(way.optimizer, warmup=int(way.warmed * steps))
    params = start(seed)
    rule = optimizer.build(steps, leaves_of(params))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    @jax.jit
    def epoch(params: Any, state: Any, order: jax.Array) -> Any:
        def step(carry: Any, rows: jax.Array) -> Any:
            params, state = carry
            updates, state = rule.update(jax.grad(loss)(params, x[rows], y[rows]), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), order)[0]

    x, y = jnp.asarray(x), jnp.asarray(y)
    state, random = rule.init(params), np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(len(x))[: per_epoch * way.batch].reshape(per_epoch, way.batch)
        params, state = epoch(params, state, jnp.asarray(order))
    return float(jnp.mean(jnp.argmax(logits(params, jnp.asarray(held_x)), -1) == jnp.asarray(held_y)))


def main() -> None:
    """Train every way, print the table; exit with 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and order")
    parser.add_argument("--tiny", action="store_true", help="one epoch, one seed: the numbers mean nothing")
    arguments = parser.parse_args()
    seeds, epochs = ([0], 1) if arguments.tiny else (arguments.seeds, EPOCHS)
    data, found = images(), {}
    for way in WAYS:
        shares = [100 * train(way, seed, epochs, data) for seed in seeds]
        found[way.name] = statistics.fmean(shares)
        print(f"{way.name:32} {found[way.name]:6.2f} +- {statistics.pstdev(shares):5.2f} %", flush=True)
    base = found["sgd 32"]
    held = {name: found[f"{name} 1024, warmed up"] >= base - WITHIN for name in ("lars", "lamb")}
    held["sgd diverges"] = max(found["sgd 1024, linear"], found["sgd 1024, linear, warmed up"]) < DIVERGED
    print("; ".join(f"{name}: {'holds' if holds else 'FAILS'}" for name, holds in held.items()))
    if not all(held.values()) and not arguments.tiny:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
