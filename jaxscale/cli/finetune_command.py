"""The subcommand finetune: make an experiment from a Hugging Face folder and a file of chats, and train it."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from jaxscale.cli.experiment_commands import Train, bytes_of
from jaxscale.cli.flags import flag, word
from jaxscale.errors import UserError
from jaxscale.values import spell


@dataclasses.dataclass(frozen=True)
class Finetune:
    """Fine-tune a Hugging Face folder on chats, or continue its run.

    A row of the data is {"messages": [...]} or {"prompt": ..., "completion": ...}.

    The chat template is the folder's, and the answers alone are learned.

    The run is like any other: generate, evaluate, export, report.

    Fields of the experiment are set by path: --plan.mesh fsdp:2 --plan.zero 3

    Exit codes: those of train.

    Args:
        pretrained: folder with config.json, safetensors, tokenizer.json and a chat template.
        data: JSONL file of chats, or a glob.
        eval: JSONL file of chats to evaluate on, before the first step too.
        lora: rank of the adapters that are trained instead of all parameters.
        epochs: number of passes over the chats.
        steps: number of updates, instead of --epochs.
        batch: number of rows in the global batch.
        context: number of tokens per row; longer chats are cut.
        out: directory of the run, which may be in a bucket (gs://, s3://).
        plan_file: plan.json file to take the plan from.
        resume: with auto, the run in the directory is continued. With never, that directory is renamed, and a new run
            starts.
        from_step: step of a checkpoint to return to, as in --from 150.
        log_every: number of steps per line of the log.
        profile: steps to trace; 10:13 traces the steps 10, 11 and 12.
        seed: seed of adapters, data order and dropout.
        name: name of the run's folder.
        limit: device memory that the step may need, such as 14GiB; --plan.memory fit chooses what fits.
    """

    pretrained: str = word("HF_FOLDER")
    data: str | None = flag("CHATS.JSONL", "required")
    eval: str | None = flag("CHATS.JSONL", "the last tenth of the data")
    lora: int | None = flag("RANK", "all parameters are trained")
    epochs: float | None = flag("N", "3, without --steps")
    steps: int | None = flag("INT", "those of --epochs")
    batch: int = 8
    context: int | None = flag("INT", "the longest chat, up to 1024")
    out: str | None = flag("DIR", "runs/NAME")
    plan_file: str | None = flag("PLAN.JSON", "bfloat16 on accelerators")
    resume: Literal["auto", "never"] = "auto"
    from_step: str | None = flag("STEP", "the newest")
    log_every: int = 1
    profile: str | None = flag("FIRST:STOP", "no steps")
    seed: int = 0
    name: str | None = flag("NAME", "FOLDER-tuned, FOLDER-loraRANK")
    limit: str | None = flag("BYTES", "what programs may use")

    def run(self, fields: Mapping[str, str]) -> int:
        """Check the flags, make the experiment, train it, and return the exit code 0."""
        self.check()
        from jaxscale.recipe.fine_tuning import fine_tuning
        from jaxscale.recipe.plan import read_plan
        from jaxscale.records.source import Source
        from jaxscale.training.loop import train
        from jaxscale.values import override

        assert self.data is not None
        size_options = {"epochs": self.epochs, "steps": self.steps, "batch": self.batch, "context": self.context}
        experiment = fine_tuning(self.pretrained, self.data, held_out=self.eval, lora=self.lora, **size_options)
        if self.plan_file is not None:
            experiment = dataclasses.replace(experiment, plan=read_plan(Path(self.plan_file)))
        flag_fields = {"seed": str(self.seed)} | ({} if self.name is None else {"name": self.name})
        experiment = override(experiment, {**flag_fields, **fields})
        train(
            experiment,
            out=self.out,
            limit=self.limit,
            resume=self.resume,
            from_step=self.from_step,
            log_every=self.log_every,
            profile=self.profile,
            source=Source(name=experiment.name, seed=experiment.seed, command=self.command_line(fields)),
        )
        return 0

    def check(self) -> None:
        """Raise UserError for an invalid value of a flag, without importing JAX."""
        from jaxscale.recipe.plan import read_plan

        if not self.data:
            raise UserError("finetune lacks --data: expected a JSONL file of chats, such as --data chats.jsonl")
        shared_names = ("resume", "from_step", "log_every", "profile")
        Train(self.pretrained, **{name: getattr(self, name) for name in shared_names}).check_progress()
        bytes_of(self.limit, "--limit")
        if self.plan_file is not None:
            read_plan(Path(self.plan_file))
        for name, number in (("lora", self.lora), ("steps", self.steps), ("batch", self.batch)):
            if number is not None and number < 1:
                raise UserError(f"--{name}: got {number}, expected a whole number >= 1")
        from jaxscale.data.chat.chat_template import folder_tokenizer, read_template

        # each of these calls raises UserError for a folder that is not as described
        read_template(self.pretrained)
        folder_tokenizer(self.pretrained)

    def command_line(self, fields: Mapping[str, str]) -> str:
        """Return the command that repeats this one."""
        words = ["jaxscale", "finetune", self.pretrained]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "word" not in field.metadata and field.name not in ("resume", "from_step") and value != field.default:
                words += [f"--{field.name.replace('_', '-')}", spell(value)]
        words += [f"--{path}={text}" for path, text in fields.items()]
        return shlex.join(words)
