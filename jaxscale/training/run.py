"""Run: a run and its results, returned by `train` or opened from its directory."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from jaxscale.errors import UserError
from jaxscale.recipe.experiment import Experiment
from jaxscale.recipe.plan import Plan
from jaxscale.records import directory as run_files
from jaxscale.records.metrics import MetricsRows, read_metrics
from jaxscale.records.storage import run_path

if TYPE_CHECKING:
    from jaxscale.generation.text_model import TextModel


class Run:
    """A run directory and, if the run was made in this process, the train state in memory.

    Args:
        directory: the run directory.
        experiment: the trained experiment; by default, it is rebuilt from the directory at first use.
        plan: the plan to rebuild the step with; by default, the experiment's plan.
        devices: devices to rebuild the step on; all by default.
        train_step: the compiled train step, if it is still in memory.
        state: the last train state, if it is still in memory.
        data: the opened data, if it is still in memory.

    Example:
        >>> Run.open("no/such/run")
        Traceback (most recent call last):
        jaxscale.errors.UserError: no/such/run holds no run: expected experiment.json there; give the directory of a run
    """

    def __init__(
        self,
        directory: Any,
        experiment: Experiment | None = None,
        plan: Plan | None = None,
        *,
        devices: Sequence[Any] | None = None,
        train_step: Any = None,
        state: Any = None,
        data: Any = None,
    ) -> None:
        self.dir = run_path(directory)
        self._experiment, self._plan, self._devices = experiment, plan, devices
        self._train_step, self._state, self._data = train_step, state, data
        self._generator: Any = None

    @classmethod
    def open(cls, directory: Any, *, trust: bool = False) -> "Run":
        """Open a run, finished or in progress, by its directory.

        The measurements are read from files. The run's experiment file builds the model. The file is executed only if
        this user has trained with it on this machine, or trusts it.

        Args:
            directory: the run directory.
            trust: whether the experiment file may be executed, now and later.

        Raises:
            UserError: the directory holds no run.
        """
        folder = run_files.existing_run(directory)
        if trust:
            from jaxscale.records.source import trust_run

            trust_run(folder)
        return cls(folder)

    # -- measurements --------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> MetricsRows:
        """Rows of the train steps: a list of dicts, with a method `column(name)` that returns an array."""
        return read_metrics(self.dir, "train")

    @property
    def evaluations(self) -> MetricsRows:
        """Rows of the held-out evaluations, with their losses."""
        return read_metrics(self.dir, "eval")

    @property
    def events(self) -> MetricsRows:
        """Rows of the events: compile, checkpoint, resume, preempted, ..."""
        return read_metrics(self.dir, "event")

    @property
    def step(self) -> int:
        """Number of updates so far."""
        rows = self.metrics
        return rows[-1]["step"] if rows else 0

    @property
    def loss(self) -> float:
        """Loss of the last step, in nats per target or the unit of the model; NaN before the first step."""
        rows = self.metrics
        return rows[-1]["loss"] if rows else float("nan")

    @property
    def held_out_loss(self) -> float:
        """The newest held-out loss, in nats per target or the unit of the model; NaN if none was measured."""
        rows = self.evaluations
        return rows[-1]["loss"] if rows else float("nan")

    @property
    def samples(self) -> list[Any]:
        """The texts that the model generated during training, as a list of `Sample`."""
        from jaxscale.records.samples import read_samples

        return read_samples(self.dir)

    # -- the model -----------------------------------------------------------------------------------------------------

    @property
    def experiment(self) -> Experiment:
        """The trained experiment."""
        if self._experiment is None:
            from jaxscale.records.source import load_experiment

            self._experiment = load_experiment(self.dir)
        return self._experiment

    @property
    def state(self) -> Any:
        """The train state after the last step, or the state of the newest checkpoint."""
        self._restore()
        return self._state

    @property
    def module(self) -> Any:
        """The model's module with the parameters of `state`."""
        self._restore()
        return self._train_step.module(self._state)

    def generate(
        self, prompt: str | Sequence[str] = "\n", tokens: int = 200, *, chat: bool | None = None, **settings: Any
    ) -> Any:
        """Return the model's continuation of a prompt; for several prompts, return a list of continuations.

        `training.generate.generate` describes the parameters.
        """
        from jaxscale.training.generate import make_sampling, model_continuations

        return model_continuations(self._text_model(), prompt, make_sampling(tokens, settings), chat)

    def stream(
        self, prompt: str = "\n", tokens: int = 200, *, chat: bool | None = None, **settings: Any
    ) -> Iterator[str]:
        """Yield pieces of the model's continuation of a prompt as they are drawn; `generate` returns them joined."""
        from jaxscale.training.generate import make_sampling, model_stream

        return model_stream(self._text_model(), prompt, make_sampling(tokens, settings), chat)

    def _text_model(self) -> "TextModel":
        """Return the model of `state` with its tokenizer, to generate text; its generator is created once."""
        from jaxscale.checkpoint.restore import read_template, read_tokenizer
        from jaxscale.generation.generator import Generator
        from jaxscale.generation.text_model import TextModel, check_can_generate, data_stops

        if self._data is not None:
            tokenizer, template = self._data.tokenizer, getattr(self._data, "chat_template", None)
        else:
            tokenizer, template = read_tokenizer(self.dir), read_template(self.dir)
        check_can_generate(self.experiment.model, tokenizer)
        if self._generator is None:
            self._restore()
            self._generator = Generator.of_step(self._train_step, self._state)
        stops = data_stops(self.experiment.data, tokenizer, template)
        return TextModel(self._generator, tokenizer, template, stops, str(self.dir))

    def _restore(self) -> None:
        """Build the step and restore the run's newest checkpoint, unless the state is in memory."""
        if self._state is not None:
            return
        from jaxscale.checkpoint.restore import restore_newest
        from jaxscale.step.build import build

        step = build(self.experiment, self._plan, devices=self._devices)
        self._train_step, self._state = step, step.from_canonical(restore_newest(self.dir, step).arrays)

    # -- for people ----------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """Return the run's most important figures as a few lines of text."""
        from jaxscale.report.summary import summary

        return summary(self.dir)

    def plot(self) -> Any:
        """Plot the losses, learning rate, gradient norm and tokens per second; return a matplotlib figure."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise UserError(
                "plot needs matplotlib: pip install 'jaxscale[notebook]', or open report.html, which has these charts"
            ) from None
        train_rows, held_out_rows = self.metrics, self.evaluations
        figure = Figure(figsize=(10, 6), layout="constrained")
        title_by_metric = {
            "loss": "loss (nats per target)",
            "learning_rate": "learning rate",
            "grad_norm": "gradient norm",
            "tokens_per_second": "tokens per second",
        }
        for axes, (metric, title) in zip(figure.subplots(2, 2).flat, title_by_metric.items(), strict=True):
            axes.plot(train_rows.column("step"), train_rows.column(metric), linewidth=1, label="train")
            if metric == "loss" and held_out_rows:
                held_out_steps, held_out_losses = held_out_rows.column("step"), held_out_rows.column("loss")
                axes.plot(held_out_steps, held_out_losses, marker="o", markersize=3, label="held out")
                axes.legend()
            axes.set_title(title)
            axes.set_xlabel("step")
        return figure

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r}, step {self.step})"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.summary())}</pre>"
