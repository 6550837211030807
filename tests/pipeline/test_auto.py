"""The choice of schedule, microbatches and stash: against pricing every candidate, and what can be told by hand."""

import pytest

from jaxscale.errors import UserError
from jaxscale.pipeline.choose.auto import choose_pipeline
from jaxscale.pipeline.choose.partition import ModelPrices, TooLarge, partition
from jaxscale.pipeline.choose.price import PipelineDevice, Price
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.pipeline.schedules import METHODS

BATCH = ModelPrices((Price(8, 8, 8, weight_bytes=10, stash_bytes=160, message_bytes=16),) * 8, last=Price(8, 8, 8))


NAMES = ("1f1b", "gpipe", "zb-h1", "interleaved")


@pytest.mark.parametrize("memory", [200, 500])
def test_nothing_that_fits_is_faster(memory: int) -> None:
    devices = [PipelineDevice(memory_bytes=memory, link=1000.0, latency=0.01)] * 3
    found = choose_pipeline(BATCH.share, 3, [3, 6], devices, names=NAMES)
    best = float("inf")
    for name in NAMES:
        method = METHODS[name]
        for count in (3, 6):
            for stash in ("residuals", "input"):
                for v in (1, 2) if method.interleaves else (None,):
                    try:
                        one = partition(BATCH.share(count), method.schedule(3, count, v), devices, stash=stash)
                    except UserError:
                        continue
                    best = min(best, one.seconds)
                    assert max(one.bytes) <= memory, name
    assert found.partition.seconds == pytest.approx(best, rel=1e-9)
    plan = PipelinePlan.parse(str(found.best))
    assert plan.schedule().microbatches == found.best.microbatches


def test_less_memory_means_recomputation() -> None:
    wide = choose_pipeline(BATCH.share, 4, [4, 16], [PipelineDevice(memory_bytes=10_000)] * 4, names=NAMES)
    tight = choose_pipeline(BATCH.share, 4, [4], [PipelineDevice(memory_bytes=200)] * 4, names=NAMES)
    assert wide.best.stash == "residuals"
    assert wide.best.microbatches == 16
    assert tight.best.stash == "input"
    assert tight.partition.seconds > wide.partition.seconds


def test_small_microbatches_that_are_slow_are_not_taken() -> None:
    def prices(count: int) -> ModelPrices:
        # a microbatch takes 1 second however small it is
        return ModelPrices((Price(1, 1, 1),) * 8)

    assert choose_pipeline(prices, 4, [2, 4, 8], names=NAMES).best.microbatches == 2


def test_the_table_tells_all() -> None:
    found = choose_pipeline(BATCH.share, 2, [3, 4], names=["1f1b", "chimera"])
    told = str(found)
    assert "1f1b:2x4" in told
    assert "chimera:2x3" in told
    assert "more cannot be faster" in told


def test_what_is_refused() -> None:
    with pytest.raises(TooLarge, match=r"auto:4: no candidate fits\. The nearest is .* needs .* on rank"):
        choose_pipeline(BATCH.share, 4, [4, 8], [PipelineDevice(memory_bytes=20)] * 4, names=NAMES)
    with pytest.raises(UserError, match="unknown synchronous schedule 'pipedream'"):
        choose_pipeline(BATCH.share, 4, [4], names=["pipedream"])
    with pytest.raises(UserError, match=r"auto:9: no schedule can run: .*the model has 8 blocks"):
        choose_pipeline(BATCH.share, 9, [9], names=["1f1b"])
