"""One model, schedule and list of devices: the seconds and bytes of every partition, as linear functions of its stages.

A partition is an array of boundaries, int[stages + 1]: stage s is blocks boundaries[s] to boundaries[s + 1] - 1.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxscale.errors import UserError, unknown
from jaxscale.pipeline.choose.chain_cut import FEATURES, INDEX, BlockChain, features
from jaxscale.pipeline.choose.footprint import footprints
from jaxscale.pipeline.choose.price import ModelPrices, PipelineDevice
from jaxscale.pipeline.clock.clock import Clock, LongestPath
from jaxscale.pipeline.orders import Kind, Schedule
from jaxscale.pipeline.run.lifetimes import Stash

_TIMED = 3  # number of features that are seconds; they come first
_SECONDS: dict[Kind, tuple[str, ...]] = {
    Kind.F: ("forward",),
    Kind.I: ("input_gradient",),
    Kind.W: ("weight_gradient",),
    Kind.B: ("input_gradient", "weight_gradient"),
    Kind.U: (),
}
"""For each kind of pass, the features whose sum is its seconds."""


class Problem:
    """The linear functions of one model, schedule and list of devices; its arguments are those of `partition`.

    A linear is float[stage, feature]: the coefficients of a linear function of the stages' features.
    """

    def __init__(
        self,
        model: ModelPrices | Mapping[str, ModelPrices],
        schedule: Schedule,
        devices: Sequence[PipelineDevice] | None,
        stash: Stash,
    ) -> None:
        self.schedule, self.stash = schedule, stash
        self.devices = tuple(devices) if devices is not None else (PipelineDevice(),) * schedule.ranks
        if len(self.devices) != schedule.ranks:
            raise UserError(
                f"got {len(self.devices)} devices, expected {schedule.ranks}, one per rank of {schedule.name}"
            )
        kinds = sorted({device.kind for device in self.devices})
        models = dict.fromkeys(kinds, model) if isinstance(model, ModelPrices) else dict(model)
        for kind in kinds:
            if kind not in models:
                raise unknown("kind of device", kind, models)
        self.models = [models[kind] for kind in kinds]
        self.blocks = len(self.models[0].blocks)
        for kind, prices in zip(kinds, self.models, strict=True):
            if len(prices.blocks) != self.blocks:
                raise UserError(
                    f"got prices of {len(prices.blocks)} blocks on devices of kind {kind!r}, but of {self.blocks} "
                    f"blocks on kind {kinds[0]!r}: each kind needs a price for every block of the model"
                )
        if schedule.stages > self.blocks:
            raise UserError(
                f"{schedule.name} of {schedule.ranks} ranks has {schedule.stages} stages, but the model has "
                f"{self.blocks} blocks. Each stage needs one: use fewer devices on the pipe axis, or fewer chunks (v)"
            )
        if len(kinds) > 1 and len(schedule.routes) > 1:
            raise UserError(
                f"{schedule.name} runs every stage on several devices, but their kinds differ ({', '.join(kinds)}): "
                "use a schedule that runs each stage on one device, such as 1f1b"
            )
        kind_of_rank = [kinds.index(device.kind) for device in self.devices]
        tables = [features(prices.blocks, prices.first, prices.last, stash == "input") for prices in self.models]
        self.chain = BlockChain(schedule.stages, tables, [kind_of_rank[rank] for rank in schedule.routes[0]])
        self.clock = Clock(schedule)
        self._pass_stages = np.array([stage for _, stage in self.clock.passes])
        self._pass_features = np.array([[name in _SECONDS[kind] for name in FEATURES] for kind, _ in self.clock.passes])
        self._pass_features = self._pass_features.astype(float)
        passes = np.arange(len(self._pass_stages))
        # float[stage * timed feature, pass]: the coefficients of each pass
        self._pass_weights = np.zeros((schedule.stages, _TIMED, len(passes)))
        self._pass_weights[self._pass_stages, :, passes] = self._pass_features[:, :_TIMED]
        self._pass_weights = self._pass_weights.reshape(-1, len(passes))
        # int[message, 2]: the stage that sends, and the link
        self._crossings = np.array(self.clock.crossings, int).reshape(-1, 2)
        self._message_features = np.zeros((len(self._crossings), len(FEATURES)))
        for row, link in zip(self._message_features, self._crossings[:, 1], strict=True):
            row[[INDEX["leaves"], INDEX["one"]]] = 1 / self.devices[link].link, self.devices[link].latency
        self.footprints = footprints(schedule)
        self.shared_bytes = [self.models[kind].shared_bytes for kind in kind_of_rank]
        self.memory_functions: list[np.ndarray] = []

    def costs(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds of the clock's passes, float[cut, pass], and of a message on each link, float[cut, rank]."""
        stage_features = self.chain.stage_features(cuts)
        pass_seconds = stage_features[:, :, :_TIMED].reshape(len(cuts), -1) @ self._pass_weights
        link_seconds = np.zeros((len(cuts), self.schedule.ranks))
        for stage, link in self._crossings:
            device = self.devices[link]
            seconds = stage_features[:, stage, INDEX["leaves"]] / device.link + device.latency
            np.maximum(link_seconds[:, link], seconds, out=link_seconds[:, link])
        return pass_seconds, link_seconds

    def seconds(self, cuts: np.ndarray) -> np.ndarray:
        """Return float[cut]: seconds of each of a batch of partitions, infinite for one that exceeds the memory."""
        seconds_of_batches = [self.clock.seconds(*self.costs(cuts[i : i + 1024])) for i in range(0, len(cuts), 1024)]
        return np.where(self.fits(cuts), np.concatenate(seconds_of_batches), np.inf)

    def fits(self, cuts: np.ndarray) -> np.ndarray:
        """Return bool[cut]: whether each of a batch of partitions fits every device's memory."""
        stages = np.arange(self.schedule.stages)
        is_feasible = np.all(self.chain.possible[stages, cuts[:, :-1], cuts[:, 1:]], axis=1)
        if self.memory_functions:
            functions = np.stack(self.memory_functions).reshape(len(self.memory_functions), -1)
            ratios = self.chain.stage_features(cuts).reshape(len(cuts), -1) @ functions.T
            is_feasible &= ratios.max(1) <= 1 + 1e-12
        return is_feasible

    def path(self, cut: np.ndarray) -> np.ndarray:
        """Return float[stage, feature]: the linear function whose value is the seconds of a partition."""
        pass_seconds, link_seconds = self.costs(cut[None])
        return self.linear(cut, self.clock.path(pass_seconds[0], link_seconds[0]))

    def linear(self, cut: np.ndarray, path: LongestPath) -> np.ndarray:
        """Return float[stage, feature]: a path as a linear function; on each link the longest message counts."""
        linear = np.zeros((self.schedule.stages, len(FEATURES)))
        np.add.at(linear, self._pass_stages, path.passes[:, None] * self._pass_features)
        if len(self._crossings):
            durations = (self.chain.stage_features(cut[None])[0, self._crossings[:, 0]] * self._message_features).sum(1)
            for link in np.flatnonzero(path.links):
                messages = np.flatnonzero(self._crossings[:, 1] == link)
                if len(messages):
                    index = messages[durations[messages].argmax()]
                    linear[self._crossings[index, 0]] += path.links[link] * self._message_features[index]
        return linear

    def bytes(self, cut: np.ndarray) -> tuple[int, ...]:
        """Return the most bytes that each rank holds."""
        stage_features = self.chain.stage_features(cut[None])[0]
        peaks = [0.0] * self.schedule.ranks
        for rank, linear in self.footprints:
            peaks[rank] = max(peaks[rank], float((stage_features * linear).sum()) + self.shared_bytes[rank])
        return tuple(int(np.ceil(count - 1e-6)) for count in peaks)

    def stage_bounds(self) -> np.ndarray:
        """Return float[stage, begin, end], a lower bound on the seconds: all passes of a stage on its busiest rank."""
        # the work of each stage on the rank that does most of it
        linear = np.zeros((self.schedule.stages, len(FEATURES)))
        pass_number = {key: index for index, key in enumerate(self.clock.passes)}
        for order in self.schedule.orders:
            rank_work = np.zeros_like(linear)
            for action in order:
                rank_work[action.stage] += self._pass_features[pass_number[action.kind, action.stage]]
            is_busier = rank_work.sum(1) > linear.sum(1)
            linear[is_busier] = rank_work[is_busier]
        return self.chain.values(linear)
