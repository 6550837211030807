"""Foreign models: an unmodified Flax NNX or Linen module as a model value that trains under any plan.

The module keeps its class, its layers, its batch statistics and its dropout. This file sets, from outside, training or
evaluation mode, dropout keys derived from seed and step, the plan's compute type, and rematerialization of
the submodules that repeat (`foreign_blocks.py`). Left out: packing (a foreign module takes no segment ids), padding of
the vocabulary, generation.
"""

import contextlib
import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import STACK_SHAPE, UNNAMED_LAYERS, Context, Loss
from jaxscale.errors import UserError
from jaxscale.layers.stack import Chain, Stack, chain_block_paths
from jaxscale.layers.targets import note_class_count
from jaxscale.models.classify import correct_indicators, cross_entropy, weighted_sum
from jaxscale.models.field_checks import check_rates
from jaxscale.models.foreign_blocks import (
    cast_arguments,
    list_member_paths,
    repeated_block_paths,
    run_as_one_block,
    wrap_blocks,
)
from jaxscale.models.foreign_chain import needs_chain, run_chain
from jaxscale.models.foreign_dims import tensor_dims
from jaxscale.models.foreign_linen import FromLinen, mode_arguments, unbox_params
from jaxscale.models.foreign_scan import needs_scan, run_scanned, scanned_param_names
from jaxscale.models.scores import bind_key, by_parts, check_losses, check_not_paired, no_new_parameters, whole_rows
from jaxscale.sharding.rules import LOGICAL_AXES, AxisRules
from jaxscale.typing import Array, Batch, Float, Key
from jaxscale.values import check_types
from jaxscale.values.functions import check_parameters
from jaxscale.values.short_repr import short_repr
from jaxscale.values.user_frames import place_of

Score = Callable[..., Any]
"""`score(module, batch)` returns one loss per row ([B]) or per target ([B, S]), neither summed nor averaged.

It may return a pair (losses, weights) of the same shape. These weights multiply those of the batch. The step's loss is
the weighted mean, so a target of weight 0 is ignored; no gradient flows through the weights. The function calls the
module like any function (`module(batch["images"])`). The mode of the module is already set.

A score with a parameter `key` gets a random key: `score(module, batch, key)`. In training, the key depends on seed,
step and microbatch, as in dropout, and with DiLoCo or a codec also on the replica. In evaluation, the key is fixed.
"""


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy between `module(batch[inputs])` and `batch[labels]`: the score of most models.

    Args:
        inputs: name of the batch's array that the module is called with.
        labels: name of the batch's array of classes: integers, in the shape of the logits without the last dim.
        smoothing: share of the target distribution that is spread evenly over all classes (label smoothing).
    """

    inputs: str
    labels: str
    smoothing: float = 0.0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_types(self)
        check_rates(self, ("smoothing",))

    def __call__(self, module: Callable[..., Any], batch: Batch) -> Array:
        """Return the loss of each label in nats, float32; 0 for a label that is not a class, such as -100."""
        logits, labels = self._logits_and_labels(module, batch)
        return cross_entropy(logits, labels, self.smoothing)

    def is_counted(self, batch: Batch) -> Array:
        """Return whether each label counts; negative labels, such as -100, are ignored."""
        return jnp.asarray(batch[self.labels]) >= 0

    def correct(self, module: Callable[..., Any], batch: Batch) -> Array:
        """Return 1.0 for each label that has the largest logit, and 0.0 for every other label."""
        return correct_indicators(*self._logits_and_labels(module, batch))

    def _logits_and_labels(self, module: Callable[..., Any], batch: Batch) -> tuple[Array, Array]:
        """Return the module's logits and the batch's labels, after a check of their names and shapes."""
        for name in (self.inputs, self.labels):
            if name not in batch:
                raise UserError(
                    f"the score reads batch[{name!r}], but the batch contains {', '.join(sorted(batch))}; "
                    "name the arrays as the data does: CrossEntropy(inputs=..., labels=...)"
                )
        logits, labels = module(batch[self.inputs]), jnp.asarray(batch[self.labels])
        shape_or_type = getattr(logits, "shape", type(logits).__name__)  # a type if the module returned no array
        if shape_or_type[:-1] != labels.shape:
            raise UserError(
                f"the module returned {shape_or_type} for labels of shape {labels.shape}; expected logits of shape "
                f"{(*labels.shape, 'classes')}: return logits, or pass ForeignModel another score"
            )
        note_class_count(self.labels, logits.shape[-1])
        return logits, labels


def classification(inputs: str = "images", labels: str = "labels", smoothing: float = 0.0) -> CrossEntropy:
    """Return the score of a module that maps images to logits of shape [B, classes]."""
    return CrossEntropy(inputs, labels, smoothing)


def language_model(inputs: str = "tokens", targets: str = "targets") -> CrossEntropy:
    """Return the score of a module that maps tokens [B, S] to the logits [B, S, V] of the tokens that follow them."""
    return CrossEntropy(inputs, targets)


@dataclasses.dataclass(frozen=True)
class ForeignModel:
    """An unmodified NNX module as a model value.

    In training, the module is set to training mode, as by `module.train()`, and arguments of its `__call__` that select
    the mode, such as `train`, are set too (`foreign_linen.TRAINING_ARGUMENTS`). In evaluation, both select evaluation.
    An argument `rngs` gets `nnx.Rngs` that depend on the step. Batch statistics are those of the microbatch, over all
    devices, and dropout depends on seed, step and microbatch. So both depend on the number of microbatches, but not on
    the mesh; in a pipeline, each device draws the masks of its own rows. With the precision bfloat16, the parameters
    are cast, and so are the module's float arguments of two or more dims. Arrays that the score itself reads, such as
    regression targets, are not cast.

    Args:
        make: function that builds the module from `nnx.Rngs` with the streams "params" and "dropout".
        score: `score(module, batch)` returns one loss per row or per target, such as `classification()` and
            `language_model()`.
        blocks: paths of the submodules that are the blocks ("layers/0", "layers/1"), or the path of a list of them
            ("encoder/layers"); by default, the submodules that repeat. Blocks are rematerialized one by one, and a
            pipeline divides them into stages. With `()`, or if no submodule repeats, the whole forward pass is one
            block.
        axes: logical axis of jaxscale for each axis name of the module's parameters, such as `{"tp": "heads"}`; a name
            that is a logical axis itself (`AxisRules`) needs no entry. Dims with other names are not sharded, and the
            run reports those names.
        over: "batch" if the loss couples the rows of a batch, as a contrastive loss does. It is then computed only for
            whole batches; with a codec, the replicas first gather the module's results. "rows" if the loss of a row
            does not depend on other rows. With `None`, this is measured where it matters: with microbatches, codecs or
            DiLoCo, and for a padded held-out batch.
        unit: unit of the loss in summaries, reports and plots, such as "mse"; by default the unit of the score, which
            is nats per target for cross-entropy, and none for a function of your own.
        scanned: names of the parameters that a scan over blocks reads row by row. A train step finds these names by
            itself (`with_scans`).

    Raises:
        UserError: `over`, `blocks` or `unit` has an invalid value, or `axes` maps a name to an unknown logical axis.

    Example:
        >>> import jax
        >>> model = ForeignModel(lambda rngs: nnx.Linear(2, 3, rngs=rngs), classification())
        >>> module = model.build(nnx.Rngs(0))
        >>> batch = {"images": jax.numpy.ones((4, 2)), "labels": jax.numpy.zeros(4, int)}
        >>> float(model.loss(module, batch, Context()).weight)
        4.0
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    score: Score
    blocks: str | tuple[str, ...] | None = None
    axes: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    over: Literal["rows", "batch"] | None = None
    unit: str = ""
    scanned: tuple[str, ...] = ()

    foreign: ClassVar[bool] = True
    """Marks a model for which a plan rejects options that need the layers of jaxscale."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if isinstance(self.over, str) and self.over not in ("rows", "batch"):
            raise UserError(f"over: got {self.over!r}, expected rows, batch or None")
        is_tuple_of_paths = isinstance(self.blocks, tuple) and all(isinstance(path, str) for path in self.blocks)
        if not (self.blocks is None or isinstance(self.blocks, str) or is_tuple_of_paths):
            raise UserError(
                f"blocks: got {self.blocks!r}, expected the path of a list of submodules, such as 'encoder/layers', or "
                "a tuple of paths of submodules"
            )
        if isinstance(self.make, nnx.Module):
            name = type(self.make).__qualname__
            raise UserError(
                f"make: got a {name} that exists already, expected a function that makes one from nnx.Rngs, such as "
                f"lambda rngs: {name}(rngs=rngs)"
            )
        check_types(self)
        if len(self.unit) > 40 or not self.unit.isprintable():
            raise UserError(f"unit: got {self.unit[:60]!r}, expected a unit of at most 40 characters, such as 'mse'")
        check_parameters(self.make, "make", 1, "lambda rngs: MyModule(rngs)")
        check_parameters(self.score, "score", 2, "classification()", keyword="key")
        code = getattr(self.score, "__code__", None)
        if code is not None and code.co_varnames[:1] == ("batch",):
            raise UserError("score: got a function of (batch, ...), expected score(module, batch)")
        for logical_axis in self.axes.values():
            AxisRules().axes(logical_axis)  # raises if there is no such axis

    def build(self, rngs: nnx.Rngs, *, vocab_multiple: int = 1) -> nnx.Module:
        """Build the user's module, without padding: a dim that a mesh axis cannot divide stays whole."""
        module = self.make(rngs)
        if not isinstance(module, nnx.Module):
            is_nnx_class = isinstance(module, type) and issubclass(module, nnx.Module)
            advice = (
                f"call it: {module.__name__}(rngs=rngs)"
                if is_nnx_class
                else ("derive the class from nnx.Module, or wrap a Linen module with linen_model(...)")
            )
            raise UserError(
                f"{place_of(self.make)}make returned {type(module).__name__}, expected an nnx.Module; {advice}"
            )
        if not jax.tree.leaves(nnx.state(module, nnx.Param)):
            raise UserError(
                f"make returned a {type(module).__name__} without any nnx.Param to train; "
                "a Linen module gets its parameters by lazy_init, as linen_model(...) does"
            )
        tensor_dims_by_name = tensor_dims(module)
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            name = "/".join(map(str, path))
            is_scanned = name in self.scanned
            if is_scanned:
                first_axis_name = (variable.get_metadata().get("out_sharding") or (None,))[0]
                is_layer_dim_unnamed = self.axes.get(str(first_axis_name), first_axis_name) != "layers"
                variable.set_metadata(**{STACK_SHAPE: tuple(variable.shape), UNNAMED_LAYERS: is_layer_dim_unnamed})
            _set_logical_axes(variable, self.axes, is_scanned=is_scanned)
            variable.set_metadata(tensor_dims=tensor_dims_by_name[name])
        return module

    def with_scans(self, batch: Batch) -> "ForeignModel":
        """Return this model with `scanned` set to the names of its stacked parameters that a scan over blocks reads.

        A model with a list of blocks, or with `blocks=()`, is returned unchanged; if `blocks` is the path of a
        stacked module, only the parameters of this module count.

        Args:
            batch: shapes of a batch.

        Example:
            >>> import jax
            >>> class Net(nnx.Module):
            ...     def __init__(self, rngs):
            ...         make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, use_bias=False, rngs=rngs))
            ...         self.layers = nnx.split_rngs(splits=3)(make)(rngs)
            ...     def __call__(self, x):
            ...         return jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]
            >>> images, labels = jax.ShapeDtypeStruct((2, 4), "float32"), jax.ShapeDtypeStruct((2,), "int32")
            >>> batch = {"images": images, "labels": labels}
            >>> ForeignModel(lambda rngs: Net(rngs), classification()).with_scans(batch).scanned
            ('layers/kernel',)
        """
        if isinstance(self.blocks, tuple) or self.scanned:
            return self
        module = nnx.eval_shape(lambda: self.build(nnx.Rngs(params=0, dropout=1)))
        if self.blocks is None and (self._has_containers(module) or self.block_paths(module)):
            return self
        graphdef, params, state = nnx.split(module, nnx.Param, ...)
        param_names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]

        def run_score(traced_params: Any, traced_state: Any, traced_batch: Batch, traced_key: Key) -> Any:
            module_copy = nnx.merge(graphdef, traced_params, traced_state, copy=True)
            plain_model = dataclasses.replace(self, blocks=())
            return plain_model._run_score(self.score, module_copy, traced_batch, Context(key=traced_key))

        key = jax.eval_shape(lambda: jax.random.key(0))
        scanned_names = scanned_param_names(jax.make_jaxpr(run_score)(params, state, dict(batch), key), param_names)
        prefix = "" if self.blocks is None else self.blocks.replace(".", "/").strip("/") + "/"
        return dataclasses.replace(self, scanned=tuple(name for name in scanned_names if name.startswith(prefix)))

    def loss(self, module: nnx.Module, batch: Batch, context: Context) -> Loss:
        """Return the sum of the weighted losses and the sum of the weights.

        In training, the call also updates the module's variables other than parameters, such as batch statistics.
        """
        batch = {name: whole_rows(array) for name, array in batch.items()}
        losses, target_weights = self._losses_and_weights(self.score, module, batch, context)
        check_losses(self.score, losses, target_weights, batch)
        if self.over is None:
            check_not_paired(self.score, losses, batch, lambda new_batch: self._losses_of(module, new_batch, context))
        constant_weights = None if target_weights is None else jax.lax.stop_gradient(target_weights)
        return weighted_sum(losses, batch, constant_weights)

    def _losses_of(self, module: nnx.Module, batch: Batch, context: Context) -> Any:
        """Return the losses of a batch, computed on a copy of the module."""
        return self._losses_and_weights(self.score, nnx.clone(module), batch, context)[0]

    @property
    def accuracy(self) -> Callable[[nnx.Module, Batch, Context], tuple[Array, Array]] | None:
        """Function for the summed weights of (correct targets, all targets); `None` if the score has no `correct`."""
        correct_fn = getattr(self.score, "correct", None)
        return None if correct_fn is None else functools.partial(self.metric, correct_fn)

    def block_paths(self, module: nnx.Module) -> tuple[str, ...]:
        """Return the paths of the module's blocks: those that `blocks` names or, by default, submodules that repeat.

        A model that scans over its blocks, or has a `layers.Stack` or `layers.Chain`, has no paths of blocks.
        """
        if self.scanned or self._has_containers(module):
            return ()
        if isinstance(self.make, FromLinen) and not isinstance(self.blocks, tuple):
            return self.make.block_paths if self.blocks is None else self.make.list_member_paths(self.blocks)
        return repeated_block_paths(module) if self.blocks is None else list_member_paths(module, self.blocks)

    def block_chains(self, module: nnx.Module) -> list[tuple[str, ...]]:
        """Return the paths of each chain of blocks: those that `blocks` names or, by default, each list of blocks."""
        paths = self.block_paths(module)
        if self._has_containers(module):
            return chain_block_paths(module)
        if self.blocks is not None:
            return [paths] if paths else []
        stems = dict.fromkeys(path.rstrip("0123456789") for path in paths)
        return [tuple(path for path in paths if path.rstrip("0123456789") == stem) for stem in stems]

    def _has_containers(self, module: nnx.Module) -> bool:
        """Return whether the blocks are those of a `layers.Stack` or `layers.Chain` in the user's module."""
        return self.blocks is None and any(isinstance(node, Stack | Chain) for _, node in nnx.iter_graph(module))

    def logical_sizes(self) -> dict[str, int]:
        """Return an empty dict: the logical axes of a foreign module are unknown."""
        return {}

    def metric(
        self, function: Score, module: nnx.Module, batch: Batch, context: Context
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the weighted sum of a metric over a batch, and the sum of the weights.

        Args:
            function: function of module and batch that returns one number per row or per target, as a score does.
            module: the module, which is called in evaluation mode unless the context has a key.
            batch: the batch.
            context: the settings of the forward pass.
        """
        metric_values, target_weights = self._losses_and_weights(function, module, batch, context)
        weighted_sums = weighted_sum(metric_values, batch, target_weights)
        return weighted_sums.total, weighted_sums.weight

    def _losses_and_weights(self, score: Score, module: nnx.Module, batch: Batch, context: Context) -> tuple[Any, Any]:
        """Return (losses, weights of the targets) from a score; the weights are `None` if all targets have weight 1."""
        score_result = self._run_score(score, module, batch, context)
        if isinstance(score_result, tuple) and len(score_result) == 2:
            return score_result
        is_counted = getattr(self.score, "is_counted", None)
        return score_result, None if is_counted is None else is_counted(batch)

    def _run_score(self, score: Score, module: nnx.Module, batch: Batch, context: Context) -> Any:
        """Return `score(module, batch)`, computed with the mode, random keys and compute type of the context."""
        # on a copy: the caller's module keeps its mode, types and rng state, and gets no variables from `sow`
        module_copy = nnx.clone(module)
        is_training = context.key is not None
        module_copy.train() if is_training else module_copy.eval()
        if context.key is not None:
            _reseed(module_copy, context)
        batch, dtype = dict(batch), None if context.dtype is None else jnp.dtype(context.dtype)
        if dtype is not None:
            _set_dtype(dtype, module_copy)
        if isinstance(module_copy, nnx.bridge.ToNNX):
            unbox_params(module_copy)
        block_paths = self.block_paths(module_copy)

        def forward(traced_module: nnx.Module, traced_batch: Batch) -> Any:
            cast_context = contextlib.nullcontext() if dtype is None else cast_arguments(traced_module, dtype)
            module_call = by_parts(_bind_mode(traced_module, is_training, _pass_key(context)), traced_batch)
            with cast_context, no_new_parameters(traced_module):
                return bind_key(score, _pass_key(context, whole_rows))(module_call, traced_batch)

        if self.scanned and needs_scan():
            score_result = run_scanned(forward, module_copy, batch, self.scanned)
        elif self.scanned or self._has_containers(module):
            score_result = forward(module_copy, batch)
        elif needs_chain():
            score_result = run_chain(forward, module_copy, batch, block_paths)
        else:
            with wrap_blocks(module_copy, block_paths):
                score_result = (
                    forward(module_copy, batch) if block_paths else run_as_one_block(forward, module_copy, batch)
                )
        if is_training:
            _copy_variables(module, module_copy)
        return score_result


def linen_model(module: Any, *inputs: Any, score: Score, unit: str = "") -> ForeignModel:
    """Return a Flax Linen module as a model value. Its blocks are submodules that repeat (`FromLinen.block_paths`).

    Training updates the collections that the module has after initialization ("batch_stats", ...).

    Args:
        module: Linen module. Its `__call__` may take a `train` argument (`foreign_linen.TRAINING_ARGUMENTS`).
        inputs: shapes and types of the arrays of one call, as `jax.ShapeDtypeStruct` or NumPy arrays. Do not pass JAX
            arrays: JAX arrays in an experiment file start the backend before the plan sets the number of devices.
        score: function of module and batch that returns the losses, as in `ForeignModel`.
        unit: unit of the loss, as in `ForeignModel`.

    Example:
        >>> import jax
        >>> from flax import linen
        >>> model = linen_model(linen.Dense(3), jax.ShapeDtypeStruct((1, 2), "float32"), score=classification())
        >>> model.build(nnx.Rngs(0)).kernel.shape
        (2, 3)
    """
    abstract_inputs = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in inputs)
    return ForeignModel(FromLinen(module, abstract_inputs), score, unit=unit)


def _set_logical_axes(variable: nnx.Variable[Any], axis_of: Mapping[str, str], *, is_scanned: bool = False) -> None:
    """Replace a parameter's axis names by logical axes, and store unknown names in the metadata `ignored_axes`.

    A dim gets `None` if it has no name, or if its name is unknown, which means that it is not a logical axis.

    Args:
        variable: the parameter.
        axis_of: maps axis names of the module to logical axes; other names stay unchanged.
        is_scanned: whether a scan reads the parameter row by row. Its first dim is then the dim of layers, whether or
            not this dim has a name (plain `nnx.vmap` adds none).
    """
    names = variable.get_metadata().get("out_sharding")
    if is_scanned:
        own_names = names if isinstance(names, tuple) else ()
        row_names = own_names[1:] if len(own_names) == len(variable.shape) else own_names
        names = ("layers", *row_names)
    if not isinstance(names, tuple) or len(names) > len(variable.shape):
        return
    logical_axes = [axis_of.get(name, name) if isinstance(name, str) else None for name in names]
    ignored_names = [name for name, axis in zip(names, logical_axes, strict=True) if name and axis not in LOGICAL_AXES]
    known_axes = [axis if axis in LOGICAL_AXES else None for axis in logical_axes]
    missing_axes = (None,) * (len(variable.shape) - len(names))
    variable.set_metadata(out_sharding=(*known_axes, *missing_axes), ignored_axes=tuple(map(str, ignored_names)))


def _bind_mode(module: nnx.Module, is_training: bool, key: Key) -> Callable[..., Any]:
    """Return the module's call with its mode arguments bound to their values for training or evaluation.

    A module whose `__call__` has a parameter `rngs` gets random streams made from `key`.
    """
    if isinstance(module, nnx.bridge.ToNNX):
        arguments: dict[str, Any] = dict(mode_arguments(module.to_nnx__module, is_training))
        variable_types = {type(variable) for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param)))}
        collection_names = {
            nnx.variable_name_from_type(variable_type)
            for variable_type in variable_types
            if not issubclass(variable_type, nnx.RngState)
        }
        arguments["mutable"] = sorted(collection_names) if is_training else False
    else:
        arguments = dict(mode_arguments(module, is_training))
        if "rngs" in inspect.signature(type(module).__call__).parameters:
            arguments["rngs"] = nnx.Rngs(jax.random.fold_in(key, zlib.crc32(b"rngs") & 0x7FFFFFFF))
    return functools.partial(module, **arguments) if arguments else module


def _pass_key(context: Context, gather: Callable[[Array], Array] = lambda rows: rows) -> Key:
    """Return the key of a forward pass. In training it depends on step and first row; in evaluation it is fixed."""
    if context.key is None:
        return jax.random.key(0)
    return context.key if context.examples is None else jax.random.fold_in(context.key, gather(context.examples)[0])


def _reseed(module: nnx.Module, context: Context) -> None:
    """Set the key of every random stream of the module from the step, the microbatch and the path of the stream."""
    key = _pass_key(context)
    for path, stream in nnx.iter_graph(module):
        if isinstance(stream, nnx.RngStream):
            stream_name = "/".join(map(str, path))
            stream_key = jax.random.fold_in(key, zlib.crc32(stream_name.encode()) & 0x7FFFFFFF)
            key_shape = stream.key.shape
            stream.key[...] = jax.random.split(stream_key, key_shape) if key_shape else stream_key
            stream.count[...] = jnp.zeros(stream.count.shape, stream.count.dtype)


def _set_dtype(dtype: Any, module: nnx.Module) -> None:
    """Set `dtype` in Flax layers whose dtype is `None`, and cast the module's parameters."""
    for _, node in nnx.iter_graph(module):
        if type(node).__module__.startswith("flax.") and getattr(node, "dtype", dtype) is None:
            setattr(node, "dtype", dtype)  # noqa: B010 - only Flax's layers have this attribute
        elif isinstance(node, nnx.Param) and not isinstance(node.get_value(), jax.Array):
            continue  # a weight on the host, cast when its block runs
        elif isinstance(node, nnx.Param) and jnp.issubdtype(node.dtype, jnp.floating):
            node.set_value(node[...].astype(dtype))  # node[...] = x would keep the old type


def _copy_variables(target: nnx.Module, source: nnx.Module) -> None:
    """Copy variables other than parameters and rng state from `source` to `target`, in the types of `target`."""
    variable_filter = nnx.All(nnx.Variable, nnx.Not(nnx.Param), nnx.Not(nnx.RngState))
    source_variable_by_path = dict(nnx.to_flat_state(nnx.state(source, variable_filter)))
    new_variable_by_path = {}
    for path, old_variable in nnx.to_flat_state(nnx.state(target, variable_filter)):
        if path in source_variable_by_path:
            new_variable = source_variable_by_path[path]
            if new_variable.shape != old_variable.shape:
                raise UserError(
                    f"variable {'/'.join(map(str, path))}: the forward pass turned shape {old_variable.shape} into "
                    f"{new_variable.shape}, but a variable that is kept from step to step must keep its shape"
                )
            new_variable_by_path[path] = old_variable.replace(new_variable[...].astype(old_variable.dtype))
    nnx.update(target, nnx.from_flat_state(new_variable_by_path))
