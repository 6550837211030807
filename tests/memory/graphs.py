"""Random block graphs for tests of selection, and what is best on them by trying everything."""

import itertools
import random

from jaxscale.memory.save_set import recompute
from jaxscale.programs.block import BlockGraph, Equation, Value


def random_graph(seed, values=None):
    """A graph of one input and up to 12 values, each made by an operation of its own; some cannot be kept."""
    draw = random.Random(seed)
    count = values or draw.randint(1, 12)
    found, equations = [Value("x", (4,), "float32", 16, -1)], []
    for number in range(count):
        inputs = tuple(sorted(draw.sample(range(len(found)), min(len(found), draw.randint(1, 3)))))
        flop = draw.choice([0, 0, draw.randint(1, 20)])
        seconds = draw.choice([0.0, draw.randint(1, 20) * 1e-6])
        equations.append(Equation("op", inputs, (number + 1,), flop, 8, seconds))
        name = f"v{number}"
        mark = name if draw.random() < 0.85 else None
        found.append(Value(name, (4,), "float32", draw.randint(1, 20), number, mark))
    needed = tuple(sorted(draw.sample(range(1, count + 1), draw.randint(1, count))))
    return BlockGraph(f"random{seed}", tuple(found), tuple(equations), (0,), (0,), (count,), needed)


def every_set(graph):
    """(bytes, FLOP, microseconds) of every save set: each subset of what has a name, and everything."""
    keepable = [index for index, value in enumerate(graph.values) if value.mark is not None]
    found = [(graph.needed_bytes, 0, 0)]
    for size in range(len(keepable) + 1):
        for kept in itertools.combinations(keepable, size):
            again = recompute(graph, kept)
            held = sum(graph.values[index].bytes for index in kept)
            found.append((held, again.flop, round(again.seconds * 1e6)))
    return found


def best(sets, budget, objective):
    """(cost, bytes) of the cheapest, and of those the smallest, within a budget."""
    column = 1 if objective == "flop" else 2
    return min((found[column], found[0]) for found in sets if found[0] <= budget)
