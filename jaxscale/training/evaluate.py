"""Held-out loss, and accuracy where the model reports it: while training, and of a run afterwards."""

from typing import Any

from jaxscale.errors import UserError

_IN_FLIGHT = 8
"""Batches that may wait on the devices at once."""


class Evaluator:
    """Measures the held-out part of the data; its programs are compiled once.

    Args:
        step: the train step.
        data: the opened data.
        one_at_a_time: wait for each batch, as the CPU platform needs.
    """

    def __init__(self, step: Any, data: Any, *, one_at_a_time: bool) -> None:
        self._step, self._data = step, data
        self._in_flight = 1 if one_at_a_time else _IN_FLIGHT

    def __call__(self, state: Any, batches: int | None = None) -> dict[str, float] | None:
        """Held-out loss, and accuracy where the model reports it.

        Args:
            state: the train state.
            batches: number of batches; all by default.

        Returns:
            `loss` (nats per target), `targets`, `accuracy` if reported; `None` where nothing is held out.
        """
        import jax

        sums: list[Any] = []
        for number, batch in enumerate(self._data.evaluation()):
            if number == batches:
                break
            device_batch = self._step.place(batch)
            loss = self._step.evaluate(state, device_batch)
            if self._in_flight == 1:
                jax.block_until_ready(loss)
            # a second forward pass: losses may come in chunks that never hold the logits whole
            sums.append((loss.total, loss.weight, self._step.accuracy(state, device_batch)))
            if len(sums) >= self._in_flight:
                jax.block_until_ready(sums[-self._in_flight])
        if not sums:
            return None
        rows = jax.device_get(sums)
        weight = sum(float(row[1]) for row in rows)
        if weight == 0:
            return None
        means = {"loss": sum(float(row[0]) for row in rows) / weight, "targets": weight}
        if rows[0][2] is not None:
            means["accuracy"] = sum(float(row[2][0]) for row in rows) / sum(float(row[2][1]) for row in rows)
        return means


def evaluate(run: Any, *, best: bool = False, batches: int | None = None) -> dict[str, Any]:
    """Held-out loss of a run's newest checkpoint, or of its best one.

    Args:
        run: the run directory.
        best: take the checkpoint with the least held-out loss.
        batches: number of held-out batches; all by default.

    Returns:
        `step`, `loss` (nats per target), `targets`, and `accuracy` where the model reports it.

    Raises:
        UserError: no run or checkpoint there, or data with nothing held out.
    """
    from jaxscale.checkpoint.restore import restore_parameters

    trained = restore_parameters(run, best=best, split=True)
    experiment = trained.experiment
    process, processes = trained.step.data_shard()
    data = experiment.data.open(experiment.batch, experiment.seed, process=process, processes=processes)
    platform = trained.step.mesh.devices.flat[0].platform
    means = Evaluator(trained.step, data, one_at_a_time=platform == "cpu")(trained.state, batches)
    if means is None:
        raise UserError(f"the data of {trained.directory} has nothing held out: set its held_out above 0")
    return {"step": trained.description.step, **means}
