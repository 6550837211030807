"""The seconds and bytes of a pipeline as linear functions of its partition, for one model, schedule and device list.

A cut is an array of boundaries, int[stages + 1]: stage s has the blocks cut[s] to cut[s + 1] - 1.
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

_SECONDS_FEATURES = 3  # number of features that are seconds; they come first
_FEATURES_OF_KIND: dict[Kind, tuple[str, ...]] = {
    Kind.F: ("forward",),
    Kind.I: ("input_gradient",),
    Kind.W: ("weight_gradient",),
    Kind.B: ("input_gradient", "weight_gradient"),
    Kind.U: (),
}
"""For each kind of pass, the features that add up to its seconds."""


class Problem:
    """The linear functions of one model, schedule and device list. The arguments are those of `partition`.

    A linear is an array float[stage, feature] with the coefficients of a linear function of the stages' features.

    Attributes:
        devices: the device of each rank.
        blocks: number of blocks of the model.
        chain: the chain of the model's blocks.
        clock: the clock of the schedule.
        footprints: the bytes of each rank at the points in time at which the rank may need the most memory.
        shared_bytes: for each rank, the bytes of the weights that all stages read and of their gradients.
        memory_linears: linears; a cut fits the memory if the value of each is at most 1.
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
                f"got {len(self.devices)} devices, expected {schedule.ranks}: one for each rank of {schedule.name}"
            )
        kinds = sorted({device.kind for device in self.devices})
        prices_of_kind = dict.fromkeys(kinds, model) if isinstance(model, ModelPrices) else dict(model)
        for kind in kinds:
            if kind not in prices_of_kind:
                raise unknown("kind of device", kind, prices_of_kind)
        model_prices = [prices_of_kind[kind] for kind in kinds]
        self.blocks = len(model_prices[0].blocks)
        for kind, prices in zip(kinds, model_prices, strict=True):
            if len(prices.blocks) != self.blocks:
                raise UserError(
                    f"got prices of {len(prices.blocks)} blocks on devices of kind {kind!r}, but prices of "
                    f"{self.blocks} blocks on kind {kinds[0]!r}: each kind needs a price for every block of the model"
                )
        if schedule.stages > self.blocks:
            raise UserError(
                f"{schedule.name} of {schedule.ranks} ranks has {schedule.stages} stages, but the model has "
                f"{self.blocks} blocks. Each stage needs a block: use fewer devices on the pipe axis or fewer chunks"
            )
        if len(kinds) > 1 and len(schedule.routes) > 1:
            raise UserError(
                f"{schedule.name} runs every stage on several devices, but their kinds differ ({', '.join(kinds)}): "
                "use a schedule that runs each stage on one device, such as 1f1b"
            )
        kind_indices = [kinds.index(device.kind) for device in self.devices]  # by rank, into `kinds`
        feature_tables = [
            features(prices.blocks, prices.first, prices.last, stash == "input") for prices in model_prices
        ]
        self.chain = BlockChain(schedule.stages, feature_tables, [kind_indices[rank] for rank in schedule.routes[0]])
        self.clock = Clock(schedule)
        self._pass_stages = np.array([stage for _, stage in self.clock.passes])
        # float[pass, feature]: the coefficients of the seconds of each pass
        self._pass_features = np.array(
            [[float(name in _FEATURES_OF_KIND[kind]) for name in FEATURES] for kind, _ in self.clock.passes]
        )
        pass_indices = np.arange(len(self._pass_stages))
        pass_weights = np.zeros((schedule.stages, _SECONDS_FEATURES, len(pass_indices)))
        pass_weights[self._pass_stages, :, pass_indices] = self._pass_features[:, :_SECONDS_FEATURES]
        # float[stage * feature of seconds, pass]: the same coefficients
        self._pass_weights = pass_weights.reshape(-1, len(pass_indices))
        # int[message, 2]: the stage that sends, and the link
        self._crossings = np.array(self.clock.crossings, int).reshape(-1, 2)
        # float[message, feature]: the coefficients of the seconds of each message
        self._message_features = np.zeros((len(self._crossings), len(FEATURES)))
        for message_row, link in zip(self._message_features, self._crossings[:, 1], strict=True):
            message_row[[INDEX["leaves"], INDEX["one"]]] = 1 / self.devices[link].link, self.devices[link].latency
        self.footprints = footprints(schedule)
        self.shared_bytes = [model_prices[index].shared_bytes for index in kind_indices]
        self.memory_linears: list[np.ndarray] = []

    def costs(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return float[cut, pass] and float[cut, rank]: the seconds of each pass, and of a message on each link.

        A link takes the seconds of its slowest message.
        """
        stage_features = self.chain.stage_features(cuts)
        pass_seconds = stage_features[:, :, :_SECONDS_FEATURES].reshape(len(cuts), -1) @ self._pass_weights
        link_seconds = np.zeros((len(cuts), self.schedule.ranks))
        for stage, link in self._crossings:
            device = self.devices[link]
            message_seconds = stage_features[:, stage, INDEX["leaves"]] / device.link + device.latency
            np.maximum(link_seconds[:, link], message_seconds, out=link_seconds[:, link])
        return pass_seconds, link_seconds

    def seconds(self, cuts: np.ndarray) -> np.ndarray:
        """Return float[cut]: the seconds of each cut of a batch; infinite for a cut that exceeds the memory."""
        seconds_of_batches = [self.clock.seconds(*self.costs(cuts[i : i + 1024])) for i in range(0, len(cuts), 1024)]
        return np.where(self._fits_memory(cuts), np.concatenate(seconds_of_batches), np.inf)

    def _fits_memory(self, cuts: np.ndarray) -> np.ndarray:
        """Return bool[cut]: whether each cut of a batch fits the memory of every device."""
        stage_indices = np.arange(self.schedule.stages)
        is_feasible = np.all(self.chain.possible[stage_indices, cuts[:, :-1], cuts[:, 1:]], axis=1)
        if self.memory_linears:
            coefficient_rows = np.stack(self.memory_linears).reshape(len(self.memory_linears), -1)
            ratios = self.chain.stage_features(cuts).reshape(len(cuts), -1) @ coefficient_rows.T
            is_feasible &= ratios.max(1) <= 1 + 1e-12
        return is_feasible

    def path(self, cut: np.ndarray) -> np.ndarray:
        """Return the linear of the longest path for a cut; its value for this cut is the cut's seconds."""
        pass_seconds, link_seconds = self.costs(cut[None])
        return self.linear(cut, self.clock.path(pass_seconds[0], link_seconds[0]))

    def linear(self, cut: np.ndarray, path: LongestPath) -> np.ndarray:
        """Return a path as a linear. Each link takes the seconds of the message that is slowest for the cut."""
        linear = np.zeros((self.schedule.stages, len(FEATURES)))
        np.add.at(linear, self._pass_stages, path.pass_counts[:, None] * self._pass_features)
        if len(self._crossings):
            message_seconds = (
                self.chain.stage_features(cut[None])[0, self._crossings[:, 0]] * self._message_features
            ).sum(1)
            for link in np.flatnonzero(path.link_counts):
                message_indices = np.flatnonzero(self._crossings[:, 1] == link)
                if len(message_indices):
                    slowest_message = message_indices[message_seconds[message_indices].argmax()]
                    linear[self._crossings[slowest_message, 0]] += (
                        path.link_counts[link] * self._message_features[slowest_message]
                    )
        return linear

    def bytes(self, cut: np.ndarray) -> tuple[int, ...]:
        """Return, for each rank, the most bytes that it holds at once if the model is divided by `cut`."""
        stage_features = self.chain.stage_features(cut[None])[0]
        peak_bytes = [0.0] * self.schedule.ranks
        for rank, linear in self.footprints:
            peak_bytes[rank] = max(peak_bytes[rank], float((stage_features * linear).sum()) + self.shared_bytes[rank])
        return tuple(int(np.ceil(byte_count - 1e-6)) for byte_count in peak_bytes)

    def stage_bounds(self) -> np.ndarray:
        """Return float[stage, begin, end]: a lower bound on the seconds of every cut with this stage.

        The bound is the total seconds of the stage's passes on one rank: the rank that runs most of them.
        """
        linear = np.zeros((self.schedule.stages, len(FEATURES)))
        index_of_pass = {kind_and_stage: index for index, kind_and_stage in enumerate(self.clock.passes)}
        for order in self.schedule.orders:
            rank_linear = np.zeros_like(linear)
            for action in order:
                rank_linear[action.stage] += self._pass_features[index_of_pass[action.kind, action.stage]]
            is_busier = rank_linear.sum(1) > linear.sum(1)
            linear[is_busier] = rank_linear[is_busier]
        return self.chain.contributions(linear)
