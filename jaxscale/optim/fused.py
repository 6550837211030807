r"""AdamW with moments in 8 bits, stepped by one kernel that updates weights and state in place.

XLA compiles the update of a quantized state to three fusions (updates, scales, codes), each of which reads the gradient
and the codes. By XLA's count they move 55 to 108 bytes a parameter on a TPU v5e; `pallas_kernels.adam8` moves 16,
and 14 with a bfloat16 gradient (`benchmarks/kernel_bytes.py`). The state is that of `quantize_state(optax.adamw(...))`,
so checkpoints and layouts are unchanged. Leaves that the kernel does not support (float32 moments, blocks of odd
length, ...) are updated by the optax rule. Left out: other rules, split weights, and state in host memory.
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
"""Name of the kernel's map, by the quantization maps of the first and the second moment."""


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Arguments of `optax.adamw`.

    Args:
        rate: learning rate as a function of the number of updates made.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: number added to the root of the second moment.
        weight_decay: factor of the decoupled weight decay.
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
    state_shardings: Params | None = None,
    clip: float | None = None,
) -> Advance:
    """AdamW with a quantized state, computed by the kernel for every leaf that it supports.

    Args:
        rule: the transformation `quantize_state(optax.adamw(...))`.
        adamw: the arguments of that `optax.adamw`.
        platform: platform of the updates: "tpu v5e", "gpu h200", or a platform and JAX's device kind.
        state_shardings: tree like the parameters of the `NamedSharding` of each parameter and its state; `None` on one
            device.
        clip: global norm that gradients are clipped to; the state is then that of `chain(clip_by_global_norm, rule)`.

    Returns:
        A function that computes the new parameters and the new state; both stay unchanged where `good` is false.

    Example:
        >>> from jaxscale.lowbit.quantized import quantize_state
        >>> params = {"w": jnp.ones((64, 64))}
        >>> rule = quantize_state(optax.adamw(lambda n: 0.5, weight_decay=0.0))
        >>> advance = fused(rule, AdamW(lambda n: 0.5, 0.9, 0.999, 1e-8, 0.0), platform="cpu")
        >>> after, _ = jax.jit(advance)(params, rule.init(params), params, jnp.ones(()), jnp.array(True))
        >>> round(float(after["w"][0, 0]), 3)
        0.5
    """

    advance_by_rule = plainly(rule if clip is None else optax.chain(optax.clip_by_global_norm(clip), rule))

    def advance(gradients: Params, state: Any, params: Params, norm: Any, good: Any) -> tuple[Params, Any]:
        rule_state = state if clip is None else state[1]
        weights, treedef = jax.tree.flatten(params)
        adam_state, schedule_state = rule_state[0], rule_state[2]

        def leaves_or(tree: Any, default: Any) -> list[Any]:
            """The leaves of a tree like the parameters, or a default for each if there is no tree."""
            return [default] * len(weights) if tree is None else treedef.flatten_up_to(tree)

        grads, mu, nu = (treedef.flatten_up_to(tree) for tree in (gradients, adam_state.mu, adam_state.nu))
        shardings, decays = leaves_or(state_shardings, None), leaves_or(adamw.mask, True)
        uses_kernel = [_kernel_runs(*leaf, platform) for leaf in zip(weights, grads, mu, nu, shardings, strict=True)]

        if not any(uses_kernel):
            return advance_by_rule(gradients, state, params, norm, good)

        def rule_part(entries: list[Any]) -> Any:
            """Tree of the entries that the rule updates; entries that the kernel updates are masked."""
            pairs = zip(entries, uses_kernel, strict=True)
            return treedef.unflatten([optax.MaskedNode() if by_kernel else entry for entry, by_kernel in pairs])

        factor = jnp.ones(()) if clip is None else jnp.where(norm < clip, 1.0, clip / norm)
        rule_inputs = (rule_part(weights), (adam_state._replace(mu=rule_part(mu), nu=rule_part(nu)), *rule_state[1:]))
        clipped_gradients = [g if clip is None else g * factor.astype(g.dtype) for g in grads]
        updates, new_state = rule.update(rule_part(clipped_gradients), rule_inputs[1], rule_inputs[0])
        rule_outputs = optax.tree.where(good, (optax.apply_updates(rule_inputs[0], updates), new_state), rule_inputs)
        hyperparams = hyper(
            adamw.rate(schedule_state.count),
            optax.safe_increment(adam_state.count),
            Settings(b1=adamw.b1, b2=adamw.b2),
            factor=factor,
            go=good,
        )
        rule_trees = (rule_outputs[0], rule_outputs[1][0].mu, rule_outputs[1][0].nu)
        new_weights, new_mu, new_nu = map(treedef.flatten_up_to, rule_trees)
        for i in (number for number, by_kernel in enumerate(uses_kernel) if by_kernel):
            decay = adamw.weight_decay if decays[i] else 0.0
            settings = Settings(mu[i].block, adamw.b1, adamw.b2, adamw.eps, decay, _MAPS[mu[i].map, nu[i].map])
            step = functools.partial(adam8, settings=settings, platform=platform)
            new_weights[i], new_mu[i], new_nu[i] = _step_leaf(
                step, shardings[i], weights[i], grads[i], mu[i], nu[i], hyperparams
            )
        new_adam = rule_outputs[1][0]._replace(mu=treedef.unflatten(new_mu), nu=treedef.unflatten(new_nu))
        new_state = (new_adam, *rule_outputs[1][1:])
        return treedef.unflatten(new_weights), new_state if clip is None else (state[0], new_state)

    return advance


def _kernel_runs(weight: Array, gradient: Array, mu: Any, nu: Any, sharding: Any, platform: str) -> bool:
    """Whether the kernel supports a leaf."""
    if not (is_quantized(mu) and is_quantized(nu)):
        return False
    if weight.dtype != jnp.float32 or gradient.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    kernel_map = _MAPS.get((mu.map, nu.map))
    if kernel_map is None or mu.block != nu.block:
        return False
    shape = weight.shape if sharding is None else sharding.shard_shape(weight.shape)
    return math.prod(shape) > 0 and shape[-2] % mu.block == 0 and runs(shape, mu.block, platform, kernel_map)


def _step_leaf(
    step: Callable[..., Any],
    sharding: NamedSharding | None,
    weight: Array,
    gradient: Array,
    mu: Quantized,
    nu: Quantized,
    hyperparams: Array,
) -> tuple[Array, Quantized, Quantized]:
    """Step one leaf by the kernel, shard by shard; return the new weight and its two moments."""
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
