r"""AdamW with moments in 8 bits, stepped by one kernel that changes weights and state where they lie.

XLA decodes, updates and encodes a quantized state in one fusion each for updates, scales and codes, and reads the
gradient and the codes in each: 55 to 108 bytes a parameter on a TPU v5e by its own count, where `pallas_kernels.adam8`
moves 16, and 14 with a bfloat16 gradient (`benchmarks/kernel_bytes.py`). The state is that of
`quantize_state(optax.adamw(...))`, so checkpoints, layouts and everything else stay as they are. Leaves that no kernel
takes (float32 moments, blocks of odd length, ...) go through the rule itself. Left out: other rules, split weights, and
state in host memory.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxscale.optim.offloaded import Advance, plainly
from jaxscale.optim.quantize import Quantized, is_quantized
from jaxscale.typing import Array, Params
from pallas_kernels.adam8.api import Settings, adam8, hyper, runs

_MAPS = {("soft8", "sqrt8"): "soft8", ("dynamic8", "dynamic8_unsigned"): "dynamic8"}
"""The kernel's name for the maps of first and second moments."""


@dataclasses.dataclass(frozen=True)
class AdamW:
    """What `optax.adamw` was made of.

    Args:
        rate: learning rate by the number of updates made.
        b1: decay of the first moment.
        b2: decay of the second.
        eps: added to the root of the second.
        weight_decay: decoupled.
        mask: tree of bools like the parameters, true where it applies; `None` decays all.
    """

    rate: Callable[[Any], Any]
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Any = None


def fused(
    rule: optax.GradientTransformation,
    adamw: AdamW,
    *,
    platform: str,
    places: Params | None = None,
    clip: float | None = None,
) -> Advance:
    """Apply AdamW with a quantized state, by the kernel where there is one for a leaf.

    Args:
        rule: `quantize_state` of `optax.adamw(adamw...)`.
        adamw: its numbers.
        platform: where updates run: "tpu v5e", "gpu h200", or a platform and JAX's device kind.
        places: tree like the parameters of the `NamedSharding` of each and its state; `None`: one device.
        clip: global norm that gradients are clipped to; the state is then that of `chain(clip_by_global_norm, rule)`.

    Example:
        >>> from jaxscale.optim.quantized import quantize_state
        >>> params = {"w": jnp.ones((64, 64))}
        >>> rule = quantize_state(optax.adamw(lambda n: 0.5, weight_decay=0.0))
        >>> advance = fused(rule, AdamW(lambda n: 0.5, 0.9, 0.999, 1e-8, 0.0), platform="cpu")
        >>> after, _ = jax.jit(advance)(params, rule.init(params), params, jnp.ones(()), jnp.array(True))
        >>> round(float(after["w"][0, 0]), 3)
        0.5
    """

    plain = plainly(rule if clip is None else optax.chain(optax.clip_by_global_norm(clip), rule))

    def advance(gradients: Params, state: Any, params: Params, norm: Any, good: Any) -> tuple[Params, Any]:
        inner = state if clip is None else state[1]
        weights, treedef = jax.tree.flatten(params)
        adam, scheduled = inner[0], inner[2]

        def leaves(tree: Any, otherwise: Any) -> list[Any]:
            return [otherwise] * len(weights) if tree is None else treedef.flatten_up_to(tree)

        given, first, second = (treedef.flatten_up_to(tree) for tree in (gradients, adam.mu, adam.nu))
        where, decays = leaves(places, None), leaves(adamw.mask, True)
        members = [_runs(*one, platform) for one in zip(weights, given, first, second, where, strict=True)]

        if not any(members):
            return plain(gradients, state, params, norm, good)

        def without(tree: list[Any]) -> Any:
            return treedef.unflatten([optax.MaskedNode() if m else x for m, x in zip(members, tree, strict=True)])

        factor = jnp.ones(()) if clip is None else jnp.where(norm < clip, 1.0, clip / norm)
        rest = (without(weights), (adam._replace(mu=without(first), nu=without(second)), *inner[1:]))
        scaled = [g if clip is None else g * factor.astype(g.dtype) for g in given]
        updates, after = rule.update(without(scaled), rest[1], rest[0])
        new = jax.tree.map(
            lambda new, old: jnp.where(good, new, old), (optax.apply_updates(rest[0], updates), after), rest
        )
        numbers = hyper(
            adamw.rate(scheduled.count),
            optax.safe_increment(adam.count),
            Settings(b1=adamw.b1, b2=adamw.b2),
            factor=factor,
            go=good,
        )
        weights, new_first, new_second = list(weights), *(list(tree) for tree in (first, second))
        for i in (i for i, member in enumerate(members) if member):
            decay = adamw.weight_decay if decays[i] else 0.0
            settings = Settings(
                first[i].block, adamw.b1, adamw.b2, adamw.eps, decay, _MAPS[first[i].map, second[i].map]
            )
            step = functools.partial(adam8, settings=settings, platform=platform)
            weights[i], new_first[i], new_second[i] = _stepped(
                step, where[i], weights[i], given[i], first[i], second[i], numbers
            )
        kept = [treedef.flatten_up_to(tree) for tree in (new[0], new[1][0].mu, new[1][0].nu)]
        joined = [
            treedef.unflatten([mine if m else other for m, mine, other in zip(members, own, others, strict=True)])
            for own, others in zip((weights, new_first, new_second), kept, strict=True)
        ]
        after = (new[1][0]._replace(mu=joined[1], nu=joined[2]), *new[1][1:])
        return joined[0], after if clip is None else (state[0], after)

    return advance


def _runs(weight: Array, gradient: Array, first: Any, second: Any, place: Any, platform: str) -> bool:
    """Whether the kernel steps a leaf."""
    if not (is_quantized(first) and is_quantized(second)):
        return False
    if weight.dtype != jnp.float32 or gradient.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    kind = _MAPS.get((first.map, second.map))
    if kind is None or first.block != second.block:
        return False
    local = weight.shape if place is None else place.shard_shape(weight.shape)
    return math.prod(local) > 0 and local[-2] % first.block == 0 and runs(local, first.block, platform, kind)


def _stepped(
    step: Callable[..., Any],
    place: NamedSharding | None,
    weight: Array,
    gradient: Array,
    first: Quantized,
    second: Quantized,
    numbers: Array,
) -> tuple[Array, Quantized, Quantized]:
    """One leaf after the kernel, each device its own shard."""
    if place is not None:
        pair = (place.spec, place.spec)
        step = jax.shard_map(
            step,
            mesh=place.mesh,
            in_specs=(place.spec, place.spec, pair, pair, jax.P()),
            out_specs=(place.spec, pair, pair),
            check_vma=False,
        )
    new, m, v = step(weight, gradient, (first.codes, first.scale), (second.codes, second.scale), numbers)
    return (
        new,
        dataclasses.replace(first, codes=m[0], scale=m[1]),
        dataclasses.replace(second, codes=v[0], scale=v[1]),
    )
