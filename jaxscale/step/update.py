"""Update: the optimizer of an experiment, with its state as the plan keeps it.

The rule is the experiment's; the plan decides in how many bits its moments are kept, and in which parts of a device's
shard they share a scale. `Layout` places what comes of it, `step/host.py` decides where it is run.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxscale.errors import UserError
from jaxscale.lowbit.quantized import quantize_state, state_bytes
from jaxscale.lowbit.split_weights import split, split_weights
from jaxscale.offload.updates import Advance
from jaxscale.optim.leaves import leaf_of
from jaxscale.optim.one_bit import Messages, clipped
from jaxscale.optim.optimizer import Optimizer
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.state.layout import device_of, placements_of
from jaxscale.state.pure_model import PureModel
from jaxscale.trees import path_name, tree_bytes
from jaxscale.typing import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Update:
    """An optimizer in its three forms.

    Args:
        plain: the experiment's rule, without clipping, as if its state were float32.
        rule: the same with its state, and its weights, as the plan keeps them.
        whole: clipping, then that.
        clip: global norm that gradients are clipped to; `None` never clips.
        split: whether weights are kept as bfloat16, and what that takes off them as part of the state.
        messages: what each replica sends, where the rule takes the mean of that; `None` takes that of gradients.
        fused: the whole step where a kernel makes it on the plan's platform; `None`: `whole`.
        unfused: why no kernel makes it of a state in few bits; `None` where one does, and of a float32 state.
        layers: whether a parameter is a stack of layers, which the rule treats one by one; `None`: that is not known of
            a rule of the user's own.
    """

    plain: optax.GradientTransformation
    rule: optax.GradientTransformation
    whole: optax.GradientTransformation
    clip: float | None
    split: bool = False
    messages: Messages | None = None
    fused: Advance | None = None
    unfused: str | None = None
    layers: Params | None = None

    @classmethod
    def of(cls, experiment: Experiment, plan: Plan, pure_model: PureModel, mesh: Mesh | AbstractMesh) -> "Update":
        """The optimizer of an experiment under a plan.

        Raises:
            UserError: its moments cannot be kept as asked, or a TPU's compiler takes none in few bits on the host.
        """
        placements, by_path = placements_of(pure_model, plan, mesh), jax.tree_util.tree_map_with_path
        places = by_path(lambda path, _: NamedSharding(mesh, placements[path_name(path)].state), pure_model.params)
        leaves = by_path(
            lambda path, leaf, place: leaf_of(
                path_name(path), pure_model.names.get(path_name(path)), leaf.shape, place
            ),
            pure_model.params,
            places,
        )
        plain = rule = experiment.optimizer.rule(experiment.steps, leaves)
        fused = unfused = None
        if plan.state.moments != "float32":
            layers = by_path(lambda path, _: pure_model.stacked(path_name(path)), pure_model.params)
            device = device_of(mesh)
            if plan.offload.optimizer_state == "host" and device.platform == "tpu":
                raise UserError(
                    f"state {plan.state.moments} with optimizer_state host: the compiler for TPU dies on numbers of so "
                    "few bits in what the host's CPU runs; take offload.optimizer_state streamed, or state.moments "
                    "float32 where the rule mixes elements of a tensor"
                )
            platform = "cpu" if plan.offload.optimizer_state == "host" else device.platform
            rule = quantize_state(rule, plan.state.moments, local=places, layers=layers, platform=platform)
            unfused = _why_unfused(experiment.optimizer, plan, platform)
            if unfused is None:
                where = f"{platform} {device.device_kind}"
                fused = _fused(experiment.optimizer, experiment.steps, rule, leaves, places, where)
        if plan.state.master == "split":
            rule = split_weights(rule)
        clip, messages = experiment.optimizer.clip, experiment.optimizer.messages(experiment.steps)
        whole = rule if clip is None else optax.chain(optax.clip_by_global_norm(clip), rule)
        if messages is not None:
            whole = clipped(rule, messages)
        known = experiment.optimizer.custom is None
        one_by_one = jax.tree.map(lambda leaf: leaf.stack > 0, leaves) if known else None
        return cls(plain, rule, whole, clip, plan.state.master == "split", messages, fused, unfused, one_by_one)

    def start(self, params: Params) -> tuple[Params, optax.OptState]:
        """Split weights, and the state before the first update.

        Args:
            params: float32.
        """
        pairs = jax.tree.map(
            lambda p: split(p) if jnp.issubdtype(p.dtype, jnp.floating) else (p, optax.MaskedNode()), params
        )
        outer = jax.tree.structure(params)
        weights, corrections = (outer.unflatten([pair[i] for pair in outer.flatten_up_to(pairs)]) for i in (0, 1))
        state: PyTree = self.rule.init(weights)
        state = state._replace(correction=corrections)
        return weights, state if self.clip is None else (optax.clip_by_global_norm(self.clip).init(weights), state)


def _why_unfused(optimizer: Optimizer, plan: Plan, platform: str) -> str | None:
    """Why the kernel of 8-bit AdamW does not step a state in few bits; `None` where it may."""
    if plan.offload.optimizer_state != "device" or plan.offload.weights != "device":
        return "it needs weights and state on the device"
    if platform not in ("tpu", "gpu"):
        return "kernels are for TPU and GPU"
    if plan.kernels.of("adam8") == "reference":
        return "reference is named"
    if plan.state.moments not in ("int8", "dynamic8"):
        return f"the kernel knows states int8 and dynamic8, not {plan.state.moments}"
    if optimizer.name != "adamw" or optimizer.custom is not None:
        return f"the kernel is AdamW, not {'a rule of your own' if optimizer.custom is not None else optimizer.name}"
    if plan.state.master == "split":
        return "it needs float32 weights, not split ones"
    return "replicas under diloco step together by XLA's program" if plan.diloco is not None else None


def _fused(
    optimizer: Optimizer, steps: int, rule: optax.GradientTransformation, leaves: Params, places: Params, platform: str
) -> Advance:
    """AdamW by the kernel of a chip."""
    from jaxscale.optim.fused import AdamW, fused

    mask = jax.tree.map(lambda leaf: leaf.decays, leaves) if optimizer.decay == "matrices" else None
    adamw = AdamW(optimizer.schedule_fn(steps), **optimizer.options(), mask=mask)
    return fused(rule, adamw, platform=platform, places=places, clip=optimizer.clip)


def describe_state(plan: Plan, state: PyTree, parameters: int) -> list[str]:
    """What a user should know of a state in few bits, one line; nothing of a float32 one.

    Args:
        plan: with the bits.
        state: shapes of the optimizer's state.
        parameters: how many numbers are trained.

    Example:
        >>> from jaxscale.lowbit.quantize import zeros
        >>> from jaxscale.recipe.plan import StatePlan
        >>> describe_state(Plan(state=StatePlan("int8")), {"mu": zeros((256, 4), "soft8", 256)}, 2048)
        ['state int8: 0.51 bytes a parameter; 1,024 moments in 1.02 bytes each, the others in float32']
    """
    if plan.state.moments == "float32":
        return []
    taken, numbers = state_bytes(state)
    rest = "the others in float32" + (", corrections of weights in int8" if plan.state.master == "split" else "")
    return [
        f"state {plan.state.moments}: {tree_bytes(state) / parameters:.2f} bytes a parameter; {numbers:,} moments in "
        f"{taken / numbers:.2f} bytes each, {rest}"
    ]
