"""One battery for every kernel: each case of its `cases.py`, by each implementation, against the reference.

A kernel's tests make a `Subject`, ask `parameters` for what to run, and `check` runs one: values, and gradients of what
is differentiable, with the reference on the same numbers in float32. TPU kernels run in Pallas' interpreter on every
JAX version; Mosaic GPU's interpreter exists from JAX 0.11 on, before that GPU kernels are not among the parameters.
Cases tagged "small" run; those tagged "slow" too are slow tests, and so is every case with the detectors of races on.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

GPU_INTERPRETER = hasattr(plgpu, "InterpretGPUParams")

TOLERANCE = {"bfloat16": 5e-3, "float16": 2e-3, "float32": 1e-5}
"""Largest difference, as a part of the largest value, by the dtype of what is compared."""
GRADIENTS = {"bfloat16": 5e-3, "float16": 2e-3, "float32": 1e-5}
"""The same of gradients."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel, as the battery sees it.

    Args:
        cases: of its `cases.py`, with `name` and `tags`.
        inputs: (case, key) to the arrays that the kernel takes.
        run: (case, implementation, interpret) to a function of these arrays: an array, or a tuple of them.
        platforms: platform by implementation: {"tpu": "tpu", "gpu": "gpu"}.
        differentiable: positions of the arrays that it is differentiated by.
        supports: (case, implementation): whether that one runs the case at all.
        tolerance, gradient_tolerance: by dtype; where a kernel's differ.
        wider: tolerance of the bfloat16 gradients of the cases so named.
        compare: (case, got, want), where values are not simply close; gradients always are.
    """

    cases: Sequence[Any]
    inputs: Callable[[Any, Any], tuple[Any, ...]]
    run: Callable[[Any, str, Any], Callable[..., Any]]
    platforms: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"tpu": "tpu", "gpu": "gpu"})
    differentiable: tuple[int, ...] = ()
    supports: Callable[[Any, str], bool] = lambda case, implementation: True
    tolerance: Mapping[str, float] = dataclasses.field(default_factory=lambda: TOLERANCE)
    gradient_tolerance: Mapping[str, float] = dataclasses.field(default_factory=lambda: GRADIENTS)
    wider: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    compare: Callable[[Any, Any, Any], None] | None = None


def parameters(subject: Subject) -> list[Any]:
    """(case, implementation, interpret) of every small case, as pytest's parameters."""
    found = []
    for name, platform in subject.platforms.items():
        if platform == "gpu" and not GPU_INTERPRETER:
            continue
        for case in subject.cases:
            if "small" not in case.tags or not subject.supports(case, name):
                continue
            slow = pytest.mark.slow
            first = "races" if platform == "gpu" else True
            marks = [slow] if "slow" in case.tags else []
            found.append(pytest.param(case, name, first, id=f"{case.name}-{name}", marks=marks))
            if platform == "tpu":
                found.append(pytest.param(case, name, "races", id=f"{case.name}-{name}-races", marks=[slow]))
    return found


def check(subject: Subject, case: Any, implementation: str, interpret: Any, capfd: Any) -> None:
    """Values and gradients of a case are the reference's, and no race was seen.

    Args:
        subject, case, implementation, interpret: what to run.
        capfd: pytest's fixture: before JAX 0.12 a race is printed.
    """
    inputs = subject.inputs(case, jax.random.key(0))
    got, got_grads = _both(subject, subject.run(case, implementation, interpret), inputs)
    want, want_grads = _both(subject, subject.run(case, "reference", False), _in_float32(inputs))
    if subject.compare is None:
        close(got, want, subject.tolerance, "values")
    else:
        subject.compare(case, got, want)
    limits = dict(subject.gradient_tolerance)
    limits["bfloat16"] = subject.wider.get(case.name, limits["bfloat16"])
    close(got_grads, want_grads, limits, "gradients")
    assert "RACE DETECTED" not in capfd.readouterr().out


def _in_float32(inputs: Any) -> Any:
    floating = jnp.floating
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, floating) else x, inputs)


def _both(subject: Subject, function: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """Outputs, and gradients of their sum weighted by random numbers, which are the same for alike outputs."""

    def weighted(*chosen: Any) -> tuple[Any, Any]:
        whole = list(inputs)
        for position, one in zip(subject.differentiable, chosen, strict=True):
            whole[position] = one
        out = function(*whole)
        leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        total = jnp.zeros((), jnp.float32)
        for i, leaf in enumerate(leaves):
            weights = jax.random.normal(jax.random.key(1 + i), leaf.shape, jnp.bfloat16)
            finite = jnp.where(jnp.isfinite(leaf), leaf, 0).astype(jnp.float32)
            total += jnp.sum(finite * weights.astype(jnp.float32))
        return total, out

    if not subject.differentiable:
        return jax.jit(function)(*inputs), ()
    chosen = tuple(inputs[position] for position in subject.differentiable)
    grads, out = jax.jit(jax.grad(weighted, tuple(range(len(chosen))), has_aux=True))(*chosen)
    return out, grads


def close(got: Any, want: Any, tolerance: Mapping[str, float], what: str) -> None:
    """Two trees of arrays are alike: integers equal, floating values within their dtype's part of the largest one."""
    assert jax.tree.structure(got) == jax.tree.structure(want), what
    for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        assert a.shape == b.shape, f"{what} {i}"
        if not jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=f"{what} {i}")
            continue
        off = error(a, b)
        limit = tolerance[a.dtype.name]
        assert off <= limit, f"{what} {i}, {a.dtype}{a.shape}: off by {off:.2g} of the largest value, allowed {limit}"


def error(got: Any, want: Any) -> float:
    """The largest difference as a part of the largest value; infinite where one is finite and the other is not."""
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
    if not np.array_equal(np.isfinite(a), np.isfinite(b)) or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    a, b = a[np.isfinite(a)], b[np.isfinite(b)]
    if a.size == 0:
        return 0.0
    return float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30))
