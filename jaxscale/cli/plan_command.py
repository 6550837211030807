"""The subcommand plan: choose the best plan for an experiment on a platform, or compare platforms."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxscale.cli.experiment_commands import (
    bytes_of,
    check_page,
    check_writable,
    load_experiment,
    named_platform,
    platform_of,
)
from jaxscale.cli.flags import flag, word
from jaxscale.errors import UserError


@dataclasses.dataclass(frozen=True)
class ChoosePlan:
    """Choose the best plan for a model and a platform.

    It is the fastest step that fits, by modeled seconds and bytes.

    Searched: mesh, ZeRO, pipeline, microbatches, memory rule, offload, loss chunks.

    Number formats and codecs stay those of the experiment, as they change results.

    The platform need not be present.

    Fields of the experiment are set by path: --model.layers 16 --plan.zero 3

    A field of the plan that is set in this way keeps its value.

    Exit codes: 0 a plan fits, 3 none fits, 2 a mistake in the arguments.

    Args:
        file: Python file that defines experiment(), such as experiments/llama_8b.py.
        variant: one of the file's VARIANTS.
        platform: platform to plan for, such as "tpu v5e:4x4" or "gpu h100 x 8"; local is this machine.
        platforms: several platforms to compare, separated by commas, as in "tpu v5e:4x4, gpu h100 x 8".
        forbid: settings that are not used, separated by commas, with or without "plan.": tensor, sequence, replica,
            zero, microbatches, pipeline, memory, offload, loss_chunk, sequence_parallel or compiler.
        objective: with time, the fastest step; with memory, the step that takes the least memory; with chips, the
            fastest step on the smallest machine, up to the platform, that it fits; with cost, the platform with the
            most tokens for a dollar, which requires --platforms and --prices.
        prices: JSON file with the price of a chip and hour of each platform, as in {"tpu v5e": 1.2, "gpu h100": 3.0}.
        limit: device memory to plan for, such as 14GiB.
        host_limit: host memory per device to plan for, such as 32GiB.
        verify: number of plans to compile, the best first; the best one that fits is chosen.
        out: file to write a page to, .html or .svg.
        save: file to write the plan to, for train --plan-file.
        lock: file to write the plan to, with the bytes and collectives of its compiled step, for check; the plan is
            compiled.
        plan_file: plan.json file whose number formats and codecs are used.
        batch: number of rows in the global batch; with free, the smallest batch whose rows per second are within 3 % of
            the most.
    """

    file: str = word("FILE")
    variant: str | None = word("[VARIANT]", None)
    platform: str = flag("PLATFORM", default="local")
    platforms: str | None = flag("PLATFORMS", "one platform")
    forbid: str | None = flag("SETTINGS", "nothing")
    objective: Literal["time", "memory", "chips", "cost"] = "time"
    prices: str | None = flag("PRICES.JSON", "none")
    limit: str | None = flag("BYTES", "what the platform's programs may use")
    host_limit: str | None = flag("BYTES", "an equal share of the host's")
    verify: int = 0
    out: str | None = flag("PAGE.HTML", "the text alone")
    save: str | None = flag("PLAN.JSON", "none")
    lock: str | None = flag("PLAN.LOCK", "none")
    plan_file: str | None = flag("PLAN.JSON", "the experiment's plan")
    batch: int | Literal["free"] | None = flag("INT|free", "the experiment's")

    def run(self, fields: Mapping[str, str]) -> int:
        """Print the choice, and return the exit code."""
        fixed = fixed_settings(fields)
        names = (name.strip().removeprefix("plan.") for name in (self.forbid or "").split(","))
        forbidden = frozenset(filter(None, names))
        self.check(fixed, forbidden)
        from jaxscale.planning.search.batches import choose_batch
        from jaxscale.planning.search.choice import PlanChoice, choose_plan
        from jaxscale.planning.search.comparison import PlatformComparison
        from jaxscale.planning.search.prices import read_prices

        is_batch_free = self.batch == "free"
        experiment, source = load_experiment(dataclasses.replace(self, batch=None) if is_batch_free else self, fields)
        options: dict[str, Any] = {
            "fixed": fixed,
            "forbidden": forbidden,
            "limit": bytes_of(self.limit, "--limit"),
            "host_limit": bytes_of(self.host_limit, "--host-limit"),
            "verify": self.compile_count,
        }

        def choose(platform: Any) -> PlanChoice:
            """Return the choice for a platform. If the batch is free, also print the choices for all batches."""
            if not is_batch_free:
                objective = "time" if self.objective == "cost" else self.objective
                return choose_plan(experiment, platform, make=source.remake, objective=objective, **options)
            batch_comparison = choose_batch(
                experiment, platform, make=lambda rows: source.with_batch(rows).remake, **options
            )
            print(f"batches on {platform}:\n{batch_comparison}", end="\n\n")
            return batch_comparison.best

        if self.platforms is None:
            choice = choose(platform_of(self.platform))
        else:
            prices = None if self.prices is None else read_prices(self.prices)
            platform_texts = [text for text in self.platforms.split(",") if text.strip()]
            comparison = PlatformComparison.of([platform_of(text) for text in platform_texts], choose, prices)
            print(comparison, end="\n\n")
            choice = comparison.best(self.objective)
        print(choice)
        if is_batch_free:
            experiment, source = dataclasses.replace(experiment, batch=choice.rows), source.with_batch(choice.rows)
            effect_text = "the learning rate and the number of steps are still the experiment's"
            print(f"and --batch {choice.rows}" + (f"; {effect_text}" if choice.fits else ""))
        if self.out is not None:
            choice.write(self.out)
            print(f"written to {self.out}")
        if self.save is not None and choice.fits:
            choice.save_plan(self.save)
            batch_text = f" --batch {choice.rows}" if is_batch_free else ""
            print(f"plan written to {self.save}; train it with --plan-file {self.save}{batch_text}")
        if self.lock is not None and choice.fits:
            from jaxscale.planning.search.lock import lock_of

            report, folder = choice.best.report, Path(self.lock).parent
            if report is None:
                raise UserError("--lock: none of the plans that were compiled fits; give more plans to --verify")
            lock_of(experiment, source, choice.plan, str(choice.platform), report, folder).write(self.lock)
            print(f"lock written to {self.lock}; compare with it: jaxscale check {self.lock}")
        return 0 if choice.fits else 3

    @property
    def compile_count(self) -> int:
        """The number of plans to compile."""
        return self.verify or int(self.lock is not None)

    def check(self, fixed: frozenset[str], forbidden: frozenset[str]) -> None:
        """Raise UserError for an invalid value of a flag, without importing JAX.

        Args:
            fixed: names of the settings that the command line sets.
            forbidden: names of the settings that --forbid lists.
        """
        from jaxscale.planning.search.prices import read_prices
        from jaxscale.planning.search.settings import check_settings
        from jaxscale.recipe.plan import read_plan
        from jaxscale.records.outline import outline

        outline(self.file, self.variant)
        bytes_of(self.limit, "--limit")
        bytes_of(self.host_limit, "--host-limit")
        check_settings(fixed, forbidden)
        for flag_name, path in (("--save", self.save), ("--lock", self.lock)):
            if path is not None:
                check_writable(flag_name, path)
        if self.batch == "free" and self.objective not in ("time", "cost"):
            raise UserError(
                f"--batch free chooses the batch by rows per second; got --objective {self.objective}, omit one of them"
            )
        if self.verify < 0:
            raise UserError(f"--verify: got {self.verify}, expected a number of plans to compile, from 0 on")
        platform_texts = (
            [self.platform] if self.platforms is None else [text for text in self.platforms.split(",") if text.strip()]
        )
        if not platform_texts:
            raise UserError(f"--platforms: got {self.platforms!r}, expected platforms such as 'tpu v5e:4x4, gpu h100'")
        if self.platforms is not None and self.platform != "local":
            raise UserError("got --platform and --platforms, expected one of them")
        platforms = [named_platform(text) for text in platform_texts]
        if self.compile_count:
            from jaxscale.compiler.target import target
            from jaxscale.platforms.detect import accelerators

            for platform in filter(None, platforms):
                target(platform, accelerators())
        if self.objective == "cost" and (self.platforms is None or self.prices is None):
            raise UserError("--objective cost compares platforms by price; give --platforms 'A, B' and --prices FILE")
        if self.prices is not None:
            if self.platforms is None:
                raise UserError("--prices: prices are compared between platforms; give --platforms 'A, B'")
            prices = read_prices(self.prices)
            for platform in filter(None, platforms):
                prices.of(platform)
        if self.plan_file is not None:
            read_plan(Path(self.plan_file))
        if self.out is not None:
            check_page(self.out)


@dataclasses.dataclass(frozen=True)
class CheckLock:
    """Compile a lock's plan again, and compare.

    A lock is written by plan --lock; its experiment file is found relative to it.

    Bytes and collectives may differ by 5 %, or more with another compiler.

    Exit codes: 0 the lock holds, 3 it does not, 2 a mistake in the arguments.

    Args:
        lock: the lock, such as plan.lock.
    """

    lock: str = word("PLAN.LOCK")

    def run(self) -> int:
        """Print the comparison, and return the exit code."""
        from jaxscale.planning.search.lock import check_lock, read_lock
        from jaxscale.records.outline import outline

        lock = read_lock(self.lock)
        outline(str(Path(self.lock).parent / lock.file), lock.variant)
        named_platform(lock.platform)
        lock_check = check_lock(self.lock)
        print(lock_check)
        return 0 if lock_check.holds else 3


def fixed_settings(fields: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the plan's settings that the command line sets. These settings keep their values.

    Args:
        fields: texts of new values for the experiment's fields, by dotted path.

    Example:
        >>> sorted(fixed_settings({"plan.zero": "3", "plan.offload.weights": "host", "model.layers": "2"}))
        ['offload', 'zero']
    """
    from jaxscale.planning.search.settings import SETTINGS

    path_parts_list = [path.replace("-", "_").split(".") for path in fields]
    setting_names = {path_parts[1] for path_parts in path_parts_list if path_parts[0] == "plan" and len(path_parts) > 1}
    has_loss_chunk = any(
        path_parts[:2] == ["plan", "kernels"] and "loss_chunk" in path_parts[2:] for path_parts in path_parts_list
    ) or any("loss_chunk" in text for path, text in fields.items() if path == "plan.kernels")
    return frozenset(setting_names & set(SETTINGS)) | ({"loss_chunk"} if has_loss_chunk else set())
