"""Held-out loss, and accuracy if the model reports it, during training and of a run afterwards."""

import itertools
from typing import Any

from jaxscale.errors import UserError

_IN_FLIGHT = 8
"""Number of batches that may wait on the devices at once."""


def held_out_means(
    step: Any, data: Any, state: Any, batches: int | None = None, *, one_at_a_time: bool
) -> dict[str, float] | None:
    """Held-out loss, and accuracy if the model reports it.

    Args:
        step: the train step, which compiles its evaluation once.
        data: the opened data.
        state: the train state.
        batches: number of batches; all by default.
        one_at_a_time: wait for each batch before the next one, which the CPU platform requires.

    Returns:
        `loss` (nats per target), `targets`, `accuracy` if reported; `None` if nothing is held out.
    """
    import jax

    in_flight = 1 if one_at_a_time else _IN_FLIGHT
    sums: list[Any] = []
    for batch in itertools.islice(data.evaluation(), batches):
        device_batch = step.place(batch)
        loss = step.evaluate(state, device_batch)
        if one_at_a_time:
            jax.block_until_ready(loss)
        # accuracy takes a second forward pass, since the loss may be computed in chunks that never hold all logits
        sums.append((loss.total, loss.weight, step.accuracy(state, device_batch)))
        if len(sums) >= in_flight:
            jax.block_until_ready(sums[-in_flight])
    host_sums = jax.device_get(sums)
    weight = sum(float(batch_weight) for _, batch_weight, _ in host_sums)
    if weight == 0:
        return None
    means = {"loss": sum(float(loss_sum) for loss_sum, _, _ in host_sums) / weight, "targets": weight}
    if host_sums[0][2] is not None:
        correct_sums, weight_sums = zip(*(accuracy for _, _, accuracy in host_sums), strict=True)
        means["accuracy"] = sum(map(float, correct_sums)) / sum(map(float, weight_sums))
    return means


def evaluate(run: Any, *, best: bool = False, batches: int | None = None) -> dict[str, Any]:
    """Held-out loss of a run's newest checkpoint, or of its best one.

    Args:
        run: the run directory.
        best: take the checkpoint with the least held-out loss.
        batches: number of held-out batches; all by default.

    Returns:
        `step`, `loss` (nats per target), `targets`, and `accuracy` if the model reports it.

    Raises:
        UserError: the directory has no run or checkpoint, or the data has nothing held out.
    """
    from jaxscale.checkpoint.restore import restore_parameters

    trained = restore_parameters(run, best=best, split=True)
    experiment = trained.experiment
    process, processes = trained.step.data_shard()
    data = experiment.data.open(experiment.batch, experiment.seed, process=process, processes=processes)
    is_cpu = trained.step.mesh.devices.flat[0].platform == "cpu"
    means = held_out_means(trained.step, data, trained.state, batches, one_at_a_time=is_cpu)
    if means is None:
        raise UserError(f"the data of {trained.directory} has nothing held out: set its held_out above 0")
    return {"step": trained.description.step, **means}
