import sys

import numpy as np
import pytest

from jaxscale.errors import UserError
from jaxscale.training.run import Run


def test_what_a_run_tells_of_itself(whole):
    run = Run.open(whole)
    assert (run.step, len(run.metrics), len(run.evaluations)) == (12, 12, 1)
    assert run.loss == run.metrics[-1]["loss"]
    assert run.held_out_loss == run.evaluations[-1]["loss"]
    assert f"{run.loss:.3f} at step 12" in run.summary()
    assert "12 of 12, 768 target tokens" in run.summary()
    assert run.summary().endswith(str(whole / "report.html"))
    assert repr(run) == f"Run({str(whole)!r}, step 12)"
    assert run._repr_html_() == f"<pre>{run.summary()}</pre>"
    assert run.experiment.name == "toy"


def test_the_plot_shows_every_step(whole):
    run = Run.open(whole)
    figure = run.plot()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["loss (nats per target)", "learning rate", "gradient norm", "tokens per second"]
    for axes, name in zip(figure.axes, ("loss", "learning_rate", "grad_norm", "tokens_per_second"), strict=True):
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), run.metrics.column(name))
    assert figure.axes[0].lines[1].get_ydata().tolist() == [run.held_out_loss]


def test_the_plot_without_matplotlib_says_what_to_install(whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'jaxscale\[notebook\]'"):
        Run.open(whole).plot()


def test_a_run_that_has_not_begun(whole):
    (whole / "metrics.jsonl").unlink()
    run = Run.open(whole)
    assert run.step == 0
    assert np.isnan(run.loss)
    assert "nothing measured yet" in run.summary()
