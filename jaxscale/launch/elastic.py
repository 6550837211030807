"""Elastic runs: after a machine is lost, the run continues with fewer replicas and the same global batch."""

import dataclasses
import sys
from typing import Any

from jaxscale.errors import UserError
from jaxscale.launch.verdict import Ending


@dataclasses.dataclass(frozen=True)
class Size:
    """The number of replicas of a run, with the mesh and the microbatches that keep the global batch the same.

    Args:
        replicas: number of replicas.
        fields: texts of the fields that differ between sizes, by dotted path: `plan.mesh` and `plan.microbatches`.
        text: batch and microbatches in words, such as "a batch of 64 in 2 microbatches".
    """

    replicas: int
    fields: dict[str, str]
    text: str


def possible_sizes(experiment: Any) -> dict[int, Size]:
    """Return the sizes at which an experiment can continue, by the number of replicas.

    The global batch stays the same, and a device never processes more rows at a time than with all replicas. So fewer
    replicas take more microbatches. If the batch cannot be split over a number of replicas, that number is left out.

    Args:
        experiment: the experiment, whose mesh has a replica axis.

    Raises:
        UserError: the plan keeps state that belongs to one replica, or has no replicas.
    """
    plan, batch = experiment.plan, experiment.batch
    mesh = plan.mesh
    if mesh is None or mesh.replica < 2:
        raise UserError(
            f"--elastic replica: got the mesh {mesh or 'auto'}, expected a replica axis, such as --plan.mesh "
            "replica:4,fsdp:8"
        )
    reason_by_field = {
        "plan.pipeline": plan.pipeline is not None and "its schedule fixes the microbatches",
        "plan.diloco": plan.diloco is not None and "each replica has weights of its own",
        "plan.reduce": plan.reduce not in (None, "float32", "bfloat16") and "each replica keeps its rounding errors",
    }
    for name, reason in reason_by_field.items():
        if reason:
            raise UserError(f"--elastic replica: {name} is set, and {reason}; leave out one of the two")
    max_rows = batch // (plan.microbatches * mesh.batch_shards)
    sizes_by_count: dict[int, Size] = {}
    for replica_count in range(1, mesh.replica + 1):
        smaller_mesh = dataclasses.replace(mesh, replica=replica_count)
        shard_count = smaller_mesh.batch_shards
        microbatch_counts = range(plan.microbatches, batch // shard_count + 1) if batch % shard_count == 0 else ()
        microbatch_count = next(
            (
                possible_count
                for possible_count in microbatch_counts
                if batch % (possible_count * shard_count) == 0 and batch // (possible_count * shard_count) <= max_rows
            ),
            None,
        )
        if microbatch_count is not None:
            fields = {"plan.mesh": str(smaller_mesh), "plan.microbatches": str(microbatch_count)}
            plural = "es" if microbatch_count > 1 else ""
            sizes_by_count[replica_count] = Size(
                replica_count, fields, f"a batch of {batch} in {microbatch_count} microbatch{plural}"
            )
    if mesh.replica not in sizes_by_count:
        raise UserError(
            f"--elastic replica: batch {batch} cannot be split into {plan.microbatches} microbatches over mesh {mesh}: "
            f"choose a batch that is a multiple of {plan.microbatches * mesh.batch_shards}"
        )
    return sizes_by_count


class Elastic:
    """The remaining replicas of a launch.

    Args:
        sizes_by_count: sizes at which the run can continue, by the number of replicas.
        process_count: number of processes, all replicas together.

    Raises:
        UserError: the processes cannot be shared evenly by the replicas.
    """

    def __init__(self, sizes_by_count: dict[int, Size], process_count: int) -> None:
        self._size_by_count, self._full_replica_count = sizes_by_count, max(sizes_by_count)
        if process_count % self._full_replica_count:
            raise UserError(
                f"--elastic replica: {process_count} processes cannot be shared evenly by {self._full_replica_count} "
                "replicas"
            )
        self._processes_per_replica = process_count // self._full_replica_count
        self._remaining_replicas = list(range(self._full_replica_count))
        self.size = sizes_by_count[self._full_replica_count]

    @property
    def slots(self) -> list[int]:
        """Indices of the processes that the next attempt starts, counted over all replicas, including lost ones."""
        used_replicas = self._remaining_replicas[: self.size.replicas]
        return [
            replica * self._processes_per_replica + index
            for replica in used_replicas
            for index in range(self._processes_per_replica)
        ]

    def note(self, ending: Ending | None) -> None:
        """Record how an attempt ended. If a process was killed, is frozen or is missing, its replica counts as lost.

        If too few replicas are left, the next attempt waits for all machines again.

        Args:
            ending: the first failure of the attempt; `None` if no process failed.
        """
        if ending is None or not (ending.code < 0 or ending.cause in ("frozen", "missing")):
            return
        lost_replica = self.slots[ending.rank] // self._processes_per_replica
        self._remaining_replicas.remove(lost_replica)
        remaining_sizes = [
            size
            for replica_count, size in self._size_by_count.items()
            if replica_count <= len(self._remaining_replicas)
        ]
        if remaining_sizes:
            self.size = max(remaining_sizes, key=lambda size: size.replicas)
            outcome_text = (
                f"goes on with {self.size.replicas} of {self._full_replica_count} replicas, and with {self.size.text}"
            )
        else:
            self._remaining_replicas, self.size = (
                list(range(self._full_replica_count)),
                self._size_by_count[self._full_replica_count],
            )
            outcome_text = f"cannot go on with fewer replicas, and starts all {self._full_replica_count} again"
        print(
            f"jaxscale: replica {lost_replica} ({ending.host}) was lost; the run {outcome_text}",
            file=sys.stderr,
            flush=True,
        )


def with_fields(command: list[str], fields: dict[str, str]) -> list[str]:
    """Return a train command in which some fields have new values.

    Example:
        >>> with_fields(["train", "e.py", "--plan.mesh=replica:4", "--out=run"], {"plan.mesh": "replica:3"})
        ['train', 'e.py', '--out=run', '--plan.mesh=replica:3']
    """
    prefixes = tuple(f"--{path}=" for path in fields)
    other_words = [word for word in command if not word.startswith(prefixes)]
    return [*other_words, *(f"--{path}={text}" for path, text in fields.items())]
