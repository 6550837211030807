"""The character-level Shakespeare model as a pipeline of stages, a variant for each schedule.

    jaxscale train experiments/pipeline_shakespeare.py
    jaxscale train experiments/pipeline_shakespeare.py:zb-v
    jaxscale draw pipeline zb-v:2x6

The recipe of `shakespeare.py`, its four layers in two stages (four, where a schedule gives each device two), on the two
devices that a CPU of two cores shows; six microbatches of two rows. The schedules differ in when a stage runs, in idle
time and memory, and not in what is computed.
"""

from collections.abc import Callable
from pathlib import Path

from jaxscale import Evaluation, Experiment, Optimizer, Plan, Samples
from jaxscale.data import Text
from jaxscale.models import Decoder
from jaxscale.pipeline import METHODS

TEXT = Path(__file__).parent / "data" / "shakespeare.txt"
CONTEXT = 64


def by(schedule: str) -> Experiment:
    """The recipe, its blocks run by a schedule."""
    return Experiment(
        name=f"pipeline_{schedule.partition(':')[0]}",
        model=Decoder(
            vocab=66,
            context=CONTEXT,
            layers=4,
            heads=4,
            embed=128,
            norm="layer_no_bias",
            mlp_kind="gelu",
            positions="learned",
            tied=True,
        ),
        data=Text(path=str(TEXT), tokenizer="char", context=CONTEXT),
        optimizer=Optimizer(learning_rate=1e-3, final_learning_rate=1e-4, warmup=100, b2=0.99),
        steps=2000,
        batch=12,
        evaluation=Evaluation(every=500),
        samples=Samples(every=500, prompts=("\n",), tokens=300, temperature=0.8),
        plan=Plan(pipeline=schedule),
    )


def experiment() -> Experiment:
    """1F1B, which holds no more microbatches than there are stages."""
    return by("1f1b:2x6")


def _variant(name: str) -> Callable[[], Experiment]:
    def variant() -> Experiment:
        return by(f"{name}:2x6")

    variant.__doc__ = METHODS[name].title
    return variant


VARIANTS = {name: _variant(name) for name, method in METHODS.items() if not method.steps and name != "search"}
