r"""AdamW with moments in 8 bits, updated together with the weights by one kernel, in place.

XLA compiles the update of a quantized state to three fusions (updates, scales, codes), each of which reads the gradient
and the codes. By XLA's count, the fusions move 55 to 108 bytes per parameter on a TPU v5e. The kernel
`pallas_kernels.adam8` moves 16 bytes, or 14 bytes with a bfloat16 gradient (`benchmarks/kernel_bytes.py`). The state is
the state of `quantize_state(optax.adamw(...))`, so checkpoints and layouts are unchanged. Leaves that the kernel does
not support (float32 moments, blocks of odd length, ...) are updated by the optax rule. Left out: other rules, split
weights, and state in host memory.
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
from jaxscale.offload.updates import Advance, update_on_device
from jaxscale.typing import Array, Params
from pallas_kernels.adam8.api import Settings, adam8, has_kernel, hyper

_KERNEL_MAPS = {("soft8", "sqrt8"): "soft8", ("dynamic8", "dynamic8_unsigned"): "dynamic8"}
"""The kernel's name for each pair (quantization map of the first moment, map of the second moment)."""


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Arguments of `optax.adamw`.

    Args:
        rate: learning rate as a function of the number of updates made.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: number added to the root of the second moment.
        weight_decay: factor of the decoupled weight decay.
        mask: tree of bools like the parameters, true where weight decay applies; `None` decays all parameters.
    """

    rate: Callable[[Any], Any]
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Any = None


def fused_advance(
    rule: optax.GradientTransformation,
    adamw: AdamW,
    *,
    platform: str,
    state_shardings: Params | None = None,
    clip: float | None = None,
) -> Advance:
    """Return a function that makes an AdamW step with a quantized state; the kernel updates the leaves it supports.

    Args:
        rule: the transformation `quantize_state(optax.adamw(...))`.
        adamw: the arguments of `optax.adamw` in `rule`.
        platform: platform of the updates: "tpu v5e", "gpu h200", or a platform and JAX's device kind.
        state_shardings: tree like the parameters, with the `NamedSharding` of each parameter and its state; `None` on
            one device.
        clip: global norm that gradients are clipped to; `None` for no clipping. With a norm, the state is the state of
            `optax.chain(optax.clip_by_global_norm(clip), rule)`.

    Returns:
        A function `(gradients, state, params, norm, is_good) -> (params, state)`. Its argument `norm` is the global
        norm of the gradients. If the scalar `is_good` is false, the function returns parameters and state unchanged.

    Example:
        >>> from jaxscale.lowbit.quantized import quantize_state
        >>> params = {"w": jnp.ones((64, 64))}
        >>> rule = quantize_state(optax.adamw(lambda n: 0.5, weight_decay=0.0))
        >>> advance = fused_advance(rule, AdamW(lambda n: 0.5, 0.9, 0.999, 1e-8, 0.0), platform="cpu")
        >>> after, _ = jax.jit(advance)(params, rule.init(params), params, jnp.ones(()), jnp.array(True))
        >>> round(float(after["w"][0, 0]), 3)
        0.5
    """

    advance_by_rule = update_on_device(rule if clip is None else optax.chain(optax.clip_by_global_norm(clip), rule))

    def advance(gradients: Params, state: Any, params: Params, norm: Any, is_good: Any) -> tuple[Params, Any]:
        """Return the new parameters and the new state; both are unchanged if `is_good` is false."""
        rule_state = state if clip is None else state[1]
        weights, treedef = jax.tree.flatten(params)
        adam_state, schedule_state = rule_state[0], rule_state[2]

        def flatten_or_repeat(tree: Any, default: Any) -> list[Any]:
            """Return the leaves of a tree like the parameters; if `tree` is `None`, the default for each parameter."""
            return [default] * len(weights) if tree is None else treedef.flatten_up_to(tree)

        grads, mus, nus = (treedef.flatten_up_to(tree) for tree in (gradients, adam_state.mu, adam_state.nu))
        shardings, decay_flags = flatten_or_repeat(state_shardings, None), flatten_or_repeat(adamw.mask, True)
        inputs_of_leaves = zip(weights, grads, mus, nus, shardings, strict=True)
        kernel_flags = [_kernel_supports(*leaf_inputs, platform) for leaf_inputs in inputs_of_leaves]

        if not any(kernel_flags):
            return advance_by_rule(gradients, state, params, norm, is_good)

        def mask_kernel_leaves(arrays: list[Any]) -> Any:
            """Return the arrays as a tree like the parameters, with a mask for each leaf that the kernel updates."""
            arrays_and_flags = zip(arrays, kernel_flags, strict=True)
            return treedef.unflatten(
                [optax.MaskedNode() if uses_kernel else array for array, uses_kernel in arrays_and_flags]
            )

        clip_factor = jnp.ones(()) if clip is None else jnp.where(norm < clip, 1.0, clip / norm)
        clipped_grads = [g if clip is None else g * clip_factor.astype(g.dtype) for g in grads]
        masked_params = mask_kernel_leaves(weights)
        masked_adam = adam_state._replace(mu=mask_kernel_leaves(mus), nu=mask_kernel_leaves(nus))
        masked_state = (masked_adam, *rule_state[1:])
        updates, new_state = rule.update(mask_kernel_leaves(clipped_grads), masked_state, masked_params)
        new_params = optax.apply_updates(masked_params, updates)
        new_params, new_state = optax.tree.where(is_good, (new_params, new_state), (masked_params, masked_state))
        rate, update_count = adamw.rate(schedule_state.count), optax.safe_increment(adam_state.count)
        hyperparams = hyper(
            rate, update_count, Settings(b1=adamw.b1, b2=adamw.b2), factor=clip_factor, is_applied=is_good
        )
        new_weights, new_mus, new_nus = map(treedef.flatten_up_to, (new_params, new_state[0].mu, new_state[0].nu))
        for index in [index for index, uses_kernel in enumerate(kernel_flags) if uses_kernel]:
            decay = adamw.weight_decay if decay_flags[index] else 0.0
            settings = Settings(
                mus[index].block, adamw.b1, adamw.b2, adamw.eps, decay, _KERNEL_MAPS[mus[index].map, nus[index].map]
            )
            run_kernel = functools.partial(adam8, settings=settings, platform=platform)
            leaf_arrays = (weights[index], grads[index], mus[index], nus[index])
            new_weights[index], new_mus[index], new_nus[index] = _step_leaf(
                run_kernel, shardings[index], *leaf_arrays, hyperparams
            )
        new_adam = new_state[0]._replace(mu=treedef.unflatten(new_mus), nu=treedef.unflatten(new_nus))
        new_rule_state = (new_adam, *new_state[1:])
        return treedef.unflatten(new_weights), new_rule_state if clip is None else (state[0], new_rule_state)

    return advance


def _kernel_supports(weight: Array, gradient: Array, mu: Any, nu: Any, sharding: Any, platform: str) -> bool:
    """Return whether the kernel supports a weight with this gradient, these moments and this sharding."""
    if not (is_quantized(mu) and is_quantized(nu)):
        return False
    if weight.dtype != jnp.float32 or gradient.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    kernel_map = _KERNEL_MAPS.get((mu.map, nu.map))
    if kernel_map is None or mu.block != nu.block:
        return False
    shard_shape = weight.shape if sharding is None else sharding.shard_shape(weight.shape)
    if math.prod(shard_shape) == 0 or shard_shape[-2] % mu.block:
        return False
    return has_kernel(shard_shape, mu.block, platform, kernel_map)


def _step_leaf(
    run_kernel: Callable[..., Any],
    sharding: NamedSharding | None,
    weight: Array,
    gradient: Array,
    mu: Quantized,
    nu: Quantized,
    hyperparams: Array,
) -> tuple[Array, Quantized, Quantized]:
    """Update one leaf by the kernel, shard by shard, and return (new weight, new first moment, new second moment).

    `run_kernel` is `adam8` with its settings, and `hyperparams` is the float32 vector that `hyper` returns.
    """
    if sharding is not None:
        moment_specs = (sharding.spec, sharding.spec)  # for codes and scales
        run_kernel = jax.shard_map(
            run_kernel,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, sharding.spec, moment_specs, moment_specs, jax.P()),
            out_specs=(sharding.spec, moment_specs, moment_specs),
            check_vma=False,
        )
    new_weight, (mu_codes, mu_scale), (nu_codes, nu_scale) = run_kernel(
        weight, gradient, (mu.codes, mu.scale), (nu.codes, nu.scale), hyperparams
    )
    new_mu = dataclasses.replace(mu, codes=mu_codes, scale=mu_scale)
    return new_weight, new_mu, dataclasses.replace(nu, codes=nu_codes, scale=nu_scale)
