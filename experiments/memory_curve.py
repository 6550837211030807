"""The curve of time against memory of one block: every way to choose what the backward pass keeps, in one picture.

    python experiments/memory_curve.py [--tiny] [-o memory_curve.svg]

A block of a Llama of 1B parameters (D 2048, F 5632, 16 and 8 heads, 2 x 2048 tokens, bfloat16, plain attention) on a
v5p: what is kept on the device against the modelled seconds that the backward pass takes longer, as a share of forward
and backward pass together. Nothing is compiled and no device is needed; it takes half a minute on 2 cores and gives

    MiB kept a layer                      0     56    113    226    471    941   1412   1883
    save, for seconds                +29.9% +24.2% +20.2% +16.4% +14.0%  +4.1%  +3.2%  +0.0%
    greedy                           +29.9% +24.9% +21.6% +17.0% +17.0%  +6.5%  +3.2%  +3.2%
    dtr_static                       +29.9% +29.4% +26.1% +16.8% +16.4%  +6.2%  +3.2%  +3.2%
    dots_with_no_batch_dims_saveable      -      -      - +19.7% +19.7% +19.7% +19.7% +19.7%
    dots_saveable                         -      -      -      -      - +15.7% +15.7% +15.7%
    offload: pofo                    +26.2% +22.1% +17.5% +16.2% +13.8%  +3.9%  +3.2%  +3.2%
    offload: capuchin                +29.9% +25.2% +21.9% +17.3% +14.4% +14.4% +11.0% +11.0%

POFO's combination of keeping, recomputing and offloading is ahead wherever memory is short. The rules that only swap
(vDNN, TFLMS, AutoSwap, SwapAdvisor) take 7 to 32 times as long again: a v5p computes far faster than its host link
moves, and plain attention has scores to move.
"""

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.blocks import Context
from jaxscale.costs.block import BlockGraph
from jaxscale.costs.collect import collect
from jaxscale.memory.decision import SaveSet
from jaxscale.memory.graph import Host, menu, solve
from jaxscale.memory.greedy import greedy
from jaxscale.memory.policy_sets import policy_set
from jaxscale.memory.selectors import SELECTORS
from jaxscale.models.decoder import Decoder
from jaxscale.platforms.platform import Platform

CHIP = Platform.parse("tpu v5p:2x2x1").chip
POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable", "everything_saveable")
SHARES = (0.0, 0.03, 0.06, 0.12, 0.25, 0.5, 0.75)
"""Budgets of the heuristics, as shares of what no plan keeps."""


class Row(NamedTuple):
    """One way to keep a block.

    Args:
        rule: who chose it.
        save: what it keeps.
        longer: seconds beyond keeping everything, as a share of forward and backward pass.
    """

    rule: str
    save: SaveSet
    longer: float


def llama(tiny: bool) -> BlockGraph:
    """The block, on one device."""
    embed, mlp, length = (128, 384, 128) if tiny else (2048, 5632, 2048)
    config = Decoder(vocab=32, context=length, layers=2, embed=embed, heads=16, kv_heads=8, mlp=mlp)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0)).blocks))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), nnx.to_pure_dict(state))
    x = jax.ShapeDtypeStruct((2, length, embed), jnp.bfloat16)

    def forward(params: Any, x: Any) -> Any:
        return nnx.merge(graphdef, params, copy=True)(x, context=Context(attention="plain"))

    [call] = collect(forward, params, x, chip=CHIP)
    return call.graph


def rows_of(graph: BlockGraph) -> list[Row]:
    """Every selector and policy, at several budgets."""
    pcie = next(link for link in CHIP.links if link.name == "pcie")
    host = Host(budget=graph.needed_bytes, bandwidth=pcie.bandwidth)
    budgets = [int(part * graph.needed_bytes) for part in SHARES]
    found = [("save, for seconds", save) for save in menu(graph, objective="seconds")]
    found += [("save, for seconds", solve(graph, budget, objective="seconds")) for budget in budgets]
    found += [("save, for FLOP", save) for save in menu(graph)]
    found += [("greedy", greedy(graph, budget, objective="seconds")) for budget in budgets]
    found += [("dtr_static", greedy(graph, budget, "dtr_static", objective="seconds")) for budget in budgets]
    found += [(policy, policy_set(graph, policy)) for policy in POLICIES]
    for name, select in SELECTORS.items():
        found += [(f"offload: {name}", select(graph, budget, host)) for budget in budgets]
    step = 3 * graph.seconds
    return [Row(rule, save, save.seconds / step) for rule, save in found]


def picture(rows: Sequence[Row], title: str) -> str:
    """Bytes kept across, seconds longer upwards, one line for each rule: SVG."""
    width, height, left, bottom = 900, 480, 70, 50
    most = max(row.save.bytes for row in rows) or 1
    # swap-only rules are far above: the picture is cut at twice what keeping nothing costs
    top = 2 * next(row.longer for row in rows if row.rule == "nothing_saveable") or 1.0

    def place(row: Row) -> tuple[float, float]:
        across = left + row.save.bytes / most * (width - left - 250)
        return across, height - bottom - min(row.longer / top, 1.0) * (height - bottom - 40)

    rules = list(dict.fromkeys(row.rule for row in rows))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="20">{escape(title)}</text>',
        f'<path d="M{left} 30V{height - bottom}H{width - 240}" fill="none" stroke="black"/>',
    ]
    for tick in range(5):
        across, up = left + tick / 4 * (width - left - 250), height - bottom - tick / 4 * (height - bottom - 40)
        parts.append(
            f'<text x="{across:.0f}" y="{height - 32}" text-anchor="middle">{tick / 4 * most / 2**20:.0f}</text>'
        )
        parts.append(f'<text x="{left - 8}" y="{up + 4:.0f}" text-anchor="end">{tick / 4 * top:+.0%}</text>')
    parts.append(f'<text x="{left + 200}" y="{height - 12}">MiB kept on the device, one layer</text>')
    for number, rule in enumerate(rules):
        color = f"hsl({number * 360 // len(rules)} 70% 42%)"
        points = [place(row) for row in sorted(rows, key=lambda row: row.save.bytes) if row.rule == rule]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        parts.append(f'<text x="{width - 230}" y="{50 + 18 * number}" fill="{color}">{escape(rule)}</text>')
    return "\n".join([*parts, "</svg>"])


def table(rows: Sequence[Row], budgets: Sequence[int]) -> str:
    """Seconds longer of each rule at each budget, the best it has within it."""
    rules = list(dict.fromkeys(row.rule for row in rows))
    lines = [" " * 34 + "".join(f"{budget / 2**20:9.0f}" for budget in budgets) + "  MiB kept"]
    for rule in rules:
        cells = []
        for budget in budgets:
            within = [row.longer for row in rows if row.rule == rule and row.save.bytes <= budget]
            cells.append(f"{min(within):+9.1%}" if within else " " * 8 + "-")
        lines.append(f"{rule:34}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Choose, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small block")
    parser.add_argument("-o", "--output", type=Path, default=Path("memory_curve.svg"), help="where to draw")
    arguments = parser.parse_args()
    graph = llama(arguments.tiny)
    rows = rows_of(graph)
    taken = f"forward and backward {3e3 * graph.seconds:.1f} ms"
    title = f"What a block keeps, and how much longer it takes: {CHIP.name}, {taken}"
    print(title)
    print(table(rows, [int(part * graph.needed_bytes) for part in (*SHARES, 1.0)]))
    arguments.output.write_text(picture(rows, title) + "\n")
    print(f"drawn to {arguments.output}")


if __name__ == "__main__":
    main()
