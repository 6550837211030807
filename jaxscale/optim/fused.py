r"""AdamW with moments in 8 bits, stepped by one kernel that updates weights and state in place.

XLA decodes, updates and encodes a quantized state in one fusion each for updates, scales and codes, and reads the
gradient and the codes in each: 55 to 108 bytes a parameter on a TPU v5e by XLA's count, where `pallas_kernels.adam8`
moves 16, and 14 with a bfloat16 gradient (`benchmarks/kernel_bytes.py`). The state is that of
`quantize_state(optax.adamw(...))`, so checkpoints and layouts are unchanged. The rule itself updates leaves that the
kernel refuses (float32 moments, blocks of odd length, ...). Left out: other rules, split weights, and
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

from jaxscale.lowbit.quantize import Quantized, is_quantized
from jaxscale.offload.updates import Advance, plainly
from jaxscale.typing import Array, Params
from pallas_kernels.adam8.api import Settings, adam8, hyper, runs

_MAPS = {("soft8", "sqrt8"): "soft8", ("dynamic8", "dynamic8_unsigned"): "dynamic8"}
"""The kernel's name for the maps of first and second moments."""


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Arguments of `optax.adamw`.

    Args:
        rate: learning rate by the number of updates made.
        b1: decay of the first moment.
        b2: decay of the second.
        eps: added to the root of the second.
        weight_decay: decoupled.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all.
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
    """Apply AdamW with a quantized state, by the kernel for every leaf that it supports.

    Args:
        rule: `quantize_state` of `optax.adamw(adamw...)`.
        adamw: its arguments.
        platform: of the updates: "tpu v5e", "gpu h200", or a platform and JAX's device kind.
        places: tree like the parameters, of the `NamedSharding` of each and its state; `None`: one device.
        clip: global norm that gradients are clipped to; the state is then that of `chain(clip_by_global_norm, rule)`.

    Example:
        >>> from jaxscale.lowbit.quantized import quantize_state
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
        adam, schedule_state = inner[0], inner[2]

        def flat(tree: Any, default: Any) -> list[Any]:
            return [default] * len(weights) if tree is None else treedef.flatten_up_to(tree)

        grads, mu, nu = (treedef.flatten_up_to(tree) for tree in (gradients, adam.mu, adam.nu))
        shardings, decays = flat(places, None), flat(adamw.mask, True)
        uses_kernel = [_kernel_runs(*leaf, platform) for leaf in zip(weights, grads, mu, nu, shardings, strict=True)]

        if not any(uses_kernel):
            return plain(gradients, state, params, norm, good)

        def rule_part(entries: list[Any]) -> Any:
            pairs = zip(entries, uses_kernel, strict=True)
            return treedef.unflatten([optax.MaskedNode() if by_kernel else entry for entry, by_kernel in pairs])

        factor = jnp.ones(()) if clip is None else jnp.where(norm < clip, 1.0, clip / norm)
        old = (rule_part(weights), (adam._replace(mu=rule_part(mu), nu=rule_part(nu)), *inner[1:]))
        clipped_gradients = [g if clip is None else g * factor.astype(g.dtype) for g in grads]
        updates, new_state = rule.update(rule_part(clipped_gradients), old[1], old[0])
        by_rule = optax.tree.where(good, (optax.apply_updates(old[0], updates), new_state), old)
        hyperparams = hyper(
            adamw.rate(schedule_state.count),
            optax.safe_increment(adam.count),
            Settings(b1=adamw.b1, b2=adamw.b2),
            factor=factor,
            go=good,
        )
        rule_trees = (by_rule[0], by_rule[1][0].mu, by_rule[1][0].nu)
        new_weights, new_mu, new_nu = map(treedef.flatten_up_to, rule_trees)
        for i in (number for number, by_kernel in enumerate(uses_kernel) if by_kernel):
            decay = adamw.weight_decay if decays[i] else 0.0
            settings = Settings(mu[i].block, adamw.b1, adamw.b2, adamw.eps, decay, _MAPS[mu[i].map, nu[i].map])
            step = functools.partial(adam8, settings=settings, platform=platform)
            new_weights[i], new_mu[i], new_nu[i] = _step_leaf(
                step, shardings[i], weights[i], grads[i], mu[i], nu[i], hyperparams
            )
        new_adam = by_rule[1][0]._replace(mu=treedef.unflatten(new_mu), nu=treedef.unflatten(new_nu))
        new_state = (new_adam, *by_rule[1][1:])
        return treedef.unflatten(new_weights), new_state if clip is None else (state[0], new_state)

    return advance


def _kernel_runs(weight: Array, gradient: Array, mu: Any, nu: Any, sharding: Any, platform: str) -> bool:
    """Whether the kernel supports a leaf."""
    if not (is_quantized(mu) and is_quantized(nu)):
        return False
    if weight.dtype != jnp.float32 or gradient.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    kind = _MAPS.get((mu.map, nu.map))
    if kind is None or mu.block != nu.block:
        return False
    local = weight.shape if sharding is None else sharding.shard_shape(weight.shape)
    return math.prod(local) > 0 and local[-2] % mu.block == 0 and runs(local, mu.block, platform, kind)


def _step_leaf(
    step: Callable[..., Any],
    sharding: NamedSharding | None,
    weight: Array,
    gradient: Array,
    mu: Quantized,
    nu: Quantized,
    hyperparams: Array,
) -> tuple[Array, Quantized, Quantized]:
    """One leaf stepped by the kernel, shard by shard."""
    if sharding is not None:
        moment_specs = (sharding.spec, sharding.spec)
        step = jax.shard_map(
            step,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, sharding.spec, moment_specs, moment_specs, jax.P()),
            out_specs=(sharding.spec, moment_specs, moment_specs),
            check_vma=False,
        )
    new_weight, new_mu, new_nu = step(weight, gradient, (mu.codes, mu.scale), (nu.codes, nu.scale), hyperparams)
    return (
        new_weight,
        dataclasses.replace(mu, codes=new_mu[0], scale=new_mu[1]),
        dataclasses.replace(nu, codes=new_nu[0], scale=new_nu[1]),
    )
