"""One battery for all rules: within the budget, nothing twice, and POFO ahead of everything by the model they share."""

import functools
import typing

import jax
import jax.numpy as jnp
import pytest

from jaxscale.errors import UserError
from jaxscale.memory.graph import solve
from jaxscale.memory.plan import Selector
from jaxscale.memory.save_set import Host, recompute, save_set, value_index
from jaxscale.memory.selectors import SELECTORS
from jaxscale.memory.selectors.swap import idle_values
from jaxscale.platforms.platform import Platform
from jaxscale.programs.block import block_graph

MiB = 2**20
SWAPPING = ("vdnn", "tflms", "autoswap", "swapadvisor")
BUDGETS = [0, 20 * MiB, 64 * MiB, 150 * MiB, 400 * MiB]


def block(p, x):
    h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6).astype(x.dtype)
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qkv")
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    x = x + jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(scores), v, p["o"])
    return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


@functools.cache
def graph(chip="tpu v5p:2x2x1"):
    sizes = {"q": (2048, 16, 128), "k": (2048, 16, 128), "v": (2048, 16, 128), "o": (16, 128, 2048)}
    sizes |= {"gate": (2048, 5632), "up": (2048, 5632), "down": (5632, 2048)}
    p = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in sizes.items()}
    x = jax.ShapeDtypeStruct((2, 1024, 2048), jnp.bfloat16)
    return block_graph(block, p, x, chip=Platform.parse(chip).chip if chip else None)


def host(bandwidth=15e9, budget=2**40):
    return Host(budget, bandwidth)


def test_every_word_of_a_plan_has_its_rule():
    assert set(SELECTORS) == set(typing.get_args(Selector))


@pytest.mark.parametrize("rule", list(SELECTORS))
@pytest.mark.parametrize("budget", BUDGETS)
def test_what_a_rule_chooses_fits_and_is_priced_by_one_model(rule, budget):
    found = SELECTORS[rule](graph(), budget, host())
    assert found.bytes <= budget
    assert found == save_set(graph(), found.keep, found.offload, host())
    if rule in SWAPPING:
        assert found.flop == 0, "they recompute no product"


@pytest.mark.parametrize("bandwidth", [15e9, 64e9, 450e9])
@pytest.mark.parametrize("budget", BUDGETS)
def test_pofo_is_never_slower_than_recomputing_alone_copying_alone_or_any_other_rule(bandwidth, budget):
    link = host(bandwidth)
    best = SELECTORS["pofo"](graph(), budget, link).seconds
    others = {name: SELECTORS[name](graph(), budget, link).seconds for name in SELECTORS if name != "pofo"}
    others["recomputing alone"] = solve(graph(), budget, objective="seconds").seconds
    for name, seconds in others.items():
        assert best <= seconds * (1 + 1e-6), name


def test_swapping_alone_is_far_behind_on_the_links_of_today_and_not_on_faster_ones():
    behind = SELECTORS["vdnn"](graph(), 64 * MiB, host()).seconds
    assert behind > 10 * SELECTORS["pofo"](graph(), 64 * MiB, host()).seconds
    fast = host(bandwidth=1e12)
    assert SELECTORS["vdnn"](graph(), 64 * MiB, fast).seconds < 3 * SELECTORS["pofo"](graph(), 64 * MiB, fast).seconds


def test_the_order_of_each_rule():
    values = idle_values(graph())
    assert all(value.seconds >= 0 for value in values)
    budget = graph().needed_bytes // 2
    first = {rule: set(SELECTORS[rule](graph(), budget, host()).offload) for rule in SWAPPING}
    longest = max((v for v in values if v.bytes > MiB), key=lambda v: v.seconds)
    assert set(longest.names) <= first["tflms"]
    largest = max(values, key=lambda v: v.seconds * v.bytes)
    assert set(largest.names) <= first["autoswap"]
    products = {name for v in values if v.is_product_input for name in v.names}
    others = {name for v in values if not v.is_product_input for name in v.names}
    assert products <= first["vdnn"] or not others & first["vdnn"], "inputs of products go before anything else"


def test_capuchin_copies_what_is_hidden_and_recomputes_the_rest():
    found = SELECTORS["capuchin"](graph(), 20 * MiB, host())
    assert found.offload
    assert found.flop > 0
    moved = [value_index(graph(), name) for name in found.offload]
    kept = [value_index(graph(), name) for name in found.keep]
    again = recompute(graph(), (*moved, *kept))
    assert found.seconds == pytest.approx(again.seconds, rel=0.05), "its copies are hidden"


@pytest.mark.parametrize("rule", SWAPPING)
def test_a_host_that_is_too_small_is_refused_by_rules_that_recompute_nothing(rule):
    with pytest.raises(
        UserError, match=r"room for only 1MiB: use offload:pofo, a larger budget, or a larger host limit"
    ):
        SELECTORS[rule](graph(), 0, host(budget=MiB))


@pytest.mark.parametrize("rule", ["pofo", "capuchin"])
def test_a_host_that_is_too_small_is_used_as_far_as_it_goes(rule):
    assert SELECTORS[rule](graph(), 0, host(budget=MiB)).host_bytes <= MiB


@pytest.mark.parametrize("rule", list(SELECTORS))
def test_a_block_without_a_chip_is_refused(rule):
    with pytest.raises(UserError, match="chip"):
        SELECTORS[rule](graph(None), 0, host())
