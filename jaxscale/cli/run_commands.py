"""The subcommands that take a run directory: generate, evaluate, export, convert-state and report."""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

from jaxscale.cli.flags import flag, word, words
from jaxscale.errors import UserError, near_miss
from jaxscale.records.storage import check_location, is_remote


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue or answer a prompt with a run or a model folder.

    The text of a single sample is printed as it is drawn.

    With a chat template, the prompt is a message, and the answer is printed.

    A run that was trained on chats has a template, and so may a folder.

    Args:
        run_dir: directory of a run, or a folder that transformers saved.
        prompt: text to continue, or message to answer.
        tokens: largest number of tokens to add.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: number of most likely tokens to draw from.
        top_p: draws from the fewest most likely tokens that have this probability together.
        min_p: draws from tokens with at least this share of the greatest probability.
        stop: text before which a continuation ends.
        chat: whether the prompt is a message, for the chat template: auto, if there is one.
        samples: number of continuations.
        seed: seed of the random draws.
        best: whether to take the checkpoint with the lowest held-out loss instead of the newest one.
        trust: whether the run's experiment file, which is not yours, may be executed.
    """

    run_dir: str = word("RUN_DIR")
    prompt: str = flag("TEXT", "a new line", default="\n")
    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = flag("K", "all tokens")
    top_p: float | None = flag("P", "all tokens")
    min_p: float | None = flag("P", "all tokens")
    stop: str | None = flag("TEXT", "none")
    chat: Literal["auto", "yes", "no"] = flag("WHEN", default="auto")
    samples: int = 1
    seed: int = 0
    best: bool = False
    trust: bool = False

    def run(self) -> None:
        """Check the flags, and print the prompt and its continuations, or the answers."""
        _check_run(self.run_dir, self.trust, takes_folder=True)
        from jaxscale.generation.sampling import Sampling

        sampling_options = {
            "temperature": self.temperature,
            "seed": self.seed,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "stop": () if self.stop is None else (self.stop,),
        }
        try:
            Sampling(tokens=self.tokens, samples=self.samples, **sampling_options)
        except UserError as error:
            name, _, reason = str(error).partition(":")
            raise UserError(f"--{name.replace('_', '-')}:{reason}") from None
        from jaxscale.training.backend import start_backend

        start_backend()
        from jaxscale.generation.text_model import TextModel
        from jaxscale.training.generate import make_sampling, model_continuations, model_stream

        chat = {"auto": None, "yes": True, "no": False}[self.chat]
        model = TextModel.open(self.run_dir, self.best)
        shown_prompt = "" if model.is_chat_message(chat) else self.prompt
        if self.samples == 1:
            text_pieces = model_stream(model, self.prompt, make_sampling(self.tokens, sampling_options), chat)
            print(shown_prompt, end="", flush=True)
            for text_piece in text_pieces:
                print(text_piece, end="", flush=True)
            print()
            return
        sampling = make_sampling(self.tokens, {**sampling_options, "samples": self.samples})
        for number, continuation in enumerate(model_continuations(model, self.prompt, sampling, chat), start=1):
            print(f"--- {number} of {self.samples}\n{shown_prompt}{continuation}")


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure the held-out loss of a run or a model folder.

    Args:
        run_dir: directory of a run, or a folder that transformers saved.
        data: file to evaluate on instead, read as the run's data; of a folder, a JSONL file of chats or a text file.
        best: whether to take the checkpoint with the lowest held-out loss instead of the newest one.
        trust: whether the run's experiment file, which is not yours, may be executed.
    """

    run_dir: str = word("RUN_DIR")
    data: str | None = flag("PATH", "what the run held out")
    best: bool = False
    trust: bool = False

    def run(self) -> None:
        """Print the step, the held-out loss and the other measurements, one per line."""
        _check_run(self.run_dir, self.trust, takes_folder=True)
        from jaxscale.training.backend import start_backend

        start_backend()
        from jaxscale.training.evaluate import evaluate

        value_by_name = evaluate(self.run_dir, best=self.best, data=self.data)
        width = max(10, *map(len, value_by_name))
        for name, value in value_by_name.items():
            print(f"{name:{width}} {value:.6g}" if isinstance(value, float) else f"{name:{width}} {value}")


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a run's model to a folder that Hugging Face can read.

    Args:
        run_dir: directory of a run.
        folder: folder to create.
        best: whether to take the checkpoint with the lowest held-out loss instead of the newest one.
        dtype: dtype of the weights in the files: float32, bfloat16 or float16.
        trust: whether the run's experiment file, which is not yours, may be executed.
    """

    run_dir: str = word("RUN_DIR")
    folder: str = word("DIR")
    best: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = flag("TYPE", default="float32")
    trust: bool = False

    def run(self) -> None:
        """Write the folder, and print its path."""
        _check_run(self.run_dir, self.trust)
        check_location(self.folder)
        if (Path(self.folder) / "experiment.json").exists():
            raise UserError(f"{self.folder} is the directory of a run: give another folder to create")
        from jaxscale.training.backend import start_backend

        start_backend()
        from jaxscale.checkpoint.export import export

        print(export(self.run_dir, self.folder, best=self.best, dtype=self.dtype))


@dataclasses.dataclass(frozen=True)
class Report:
    """Write a run's report again, or draw several runs on one page.

    Only the files of the runs are read.

    Args:
        run_dir: directory of a run.
        others: directories of further runs, to draw all of them on one page.
        out: file to write the page of several runs to, .html.
    """

    run_dir: str = word("RUN_DIR")
    others: tuple[str, ...] = words("[RUN_DIR...]")
    out: str | None = flag("PAGE.HTML", "comparison.html")

    def run(self) -> None:
        """Write the report and print the summary of the run, or write the page of several runs and print its path."""
        for run_dir in (self.run_dir, *self.others):
            _check_run(run_dir)
        if self.others:
            from jaxscale.report.comparison import write_comparison

            path = "comparison.html" if self.out is None else self.out
            if not path.endswith(".html"):
                raise UserError(f"--out {path}: expected a name that ends in .html")
            write_comparison((self.run_dir, *self.others), path)
            print(f"written to {path}")
            return
        if self.out is not None:
            raise UserError(f"--out {self.out}: it is for several runs, and that of one is in its directory: omit it")
        from jaxscale.report.page import write_report
        from jaxscale.report.summary import summary

        write_report(self.run_dir)
        print(summary(self.run_dir, color=sys.stdout.isatty()))


@dataclasses.dataclass(frozen=True)
class ConvertState:
    """Convert a run's optimizer moments to another format.

    A run that is continued with another --plan.state.moments needs none.

    Args:
        run_dir: directory of a run.
        to: new format of the moments: float32, int8, dynamic8, int4 or fp8.
        out: directory to create.
        trust: whether the run's experiment file, which is not yours, may be executed.
    """

    run_dir: str = word("RUN_DIR")
    to: Literal["float32", "int8", "dynamic8", "int4", "fp8"] = flag("BITS", default="float32")
    out: str | None = flag("DIR", "RUN_DIR-TO")
    trust: bool = False

    def run(self) -> None:
        """Write the converted run, and print a line for each kind of converted array."""
        _check_run(self.run_dir, self.trust)
        from jaxscale.training.backend import start_backend

        start_backend()
        from jaxscale.checkpoint.convert import convert_state

        print(convert_state(self.run_dir, self.to, self.out))


def _check_run(run_dir: str, is_trusted: bool = False, *, takes_folder: bool = False) -> None:
    """Check the directory of a run. If the user declares its experiment file trusted, record that.

    Args:
        run_dir: directory of a run; with `takes_folder`, it may also be a folder that transformers saved.
        is_trusted: whether the user declares the experiment file trusted.
        takes_folder: whether the subcommand also takes a folder that transformers saved.

    Raises:
        UserError: the path is invalid, or the directory contains no run; the message suggests similar run directories.
    """
    check_location(run_dir)
    path = Path(run_dir)
    if is_remote(run_dir) or (path / "experiment.json").is_file():
        if is_trusted:
            from jaxscale.records.source import trust_run

            trust_run(run_dir)
        return
    if (path / "config.json").is_file():
        if takes_folder:
            return
        raise UserError(
            f"{run_dir} is a model folder of Hugging Face, expected the directory of a run; such a folder can be given "
            "to finetune, generate and evaluate"
        )
    known_dirs = [
        str(file.parent) for parent in {path.parent, Path("runs")} for file in parent.glob("*/experiment.json")
    ]
    problem_text = "holds no run (no experiment.json)" if path.exists() else "does not exist"
    advice = "; start a run with: jaxscale train FILE"
    if known_dirs:
        advice = f"; there are {', '.join(sorted(known_dirs)[:8])}"
    raise UserError(f"run directory {run_dir} {problem_text}{near_miss(run_dir, known_dirs) or advice}")
