"""An experiment with a combination of techniques that is drawn at random: number `INDEX` of the seed `SEED`."""

import dataclasses
import os

from composing.draws import draw
from composing.twins import experiment_of, plan_of

import jaxscale as jx


def experiment() -> jx.Experiment:
    """The combination, on a line of text."""
    combination = draw(int(os.environ["SEED"]), int(os.environ["INDEX"]))
    drawn_experiment = experiment_of(combination)
    return dataclasses.replace(
        drawn_experiment,
        name="drawn",
        model=dataclasses.replace(drawn_experiment.model, vocab=256),
        data=jx.data.Text(os.environ["TEXT"], tokenizer="byte", context=combination.length),
        steps=6,
        evaluation=jx.Evaluation(every=0),
        samples=jx.Samples(every=0),
        plan=plan_of(combination.plan),
    )
