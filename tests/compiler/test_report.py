import dataclasses

import pytest

from jaxscale.compiler.collectives import Collective
from jaxscale.compiler.report import CompileReport, LiveBytes, LiveTensor, OutOfMemory, out_of_memory

GIB = 2**30
# as libtpu 0.0.51, 0.0.42 and XLA's own allocator print them
MESSAGES = {
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (16.88G) exceeds available HBM (15.75G). HLO module: jit_step.": ("device", 16.88 * GIB, 15.75 * GIB),
    "RESOURCE_EXHAUSTED: [E1000: CompileTimeHbmOom: (12)] Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (96.38G) exceeds available HBM (15.75G)": ("device", 96.38 * GIB, 15.75 * GIB),
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.14G of 15.48G hbm. Exceeded hbm capacity by "
    "5.66G.": ("device", 21.14 * GIB, 15.48 * GIB),
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating on "
    "stack for %call.1 = f32[65536,1024]{1,0:T(8,128)} custom-call(%x.1). Scoped allocation with size 64.00M "
    "and limit 16.00M exceeded scoped vmem limit by 48.00M.": ("on-chip", 64 * 2**20, 16 * 2**20),
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 256.00M of "
    "128.00M vmem. Exceeded vmem capacity by 128.00M.": ("on-chip", 256 * 2**20, 128 * 2**20),
    "RESOURCE_EXHAUSTED: Allocation (size=147456000) would exceed memory (size=134217728) :: #allocation3 [shape = "
    "'f32[72000,512]{1,0:T(8,128)}', space=vmem, size = 0x8ca0000, scoped, tag = 'scratch operand']": (
        "on-chip",
        147456000,
        134217728,
    ),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_the_two_numbers_of_a_message(message):
    found = out_of_memory(message)
    assert found is not None
    memory, required, available = MESSAGES[message]
    assert (found.memory, found.required, found.available) == (memory, int(required), int(available))
    assert found.message == message


def test_another_message_is_not_about_memory():
    assert out_of_memory("INTERNAL: Mosaic failed to compile TPU kernel: bad size 3 of memory") is None


REPORT = CompileReport(
    "tpu v5e:2x2",
    argument_bytes=48,
    output_bytes=16,
    alias_bytes=16,
    temp_bytes=100,
    host_argument_bytes=7,
    host_output_bytes=5,
    host_alias_bytes=5,
    host_temp_bytes=3,
    flop=1234,
    collectives=(
        Collective("all-gather", ("fsdp",), 8, 3, "bf16", "body", True),
        Collective("all-reduce", ("data", "fsdp"), 4, 1, "f32", "main"),
        Collective("all-reduce", None, 2, 1, "f32", "main"),
    ),
    live=(LiveTensor("layers/mlp", 64, "kept", "bf16[4,8]", "forward", True),),
    timeline=(LiveBytes(0, {"argument": 48}), LiveBytes(9, {"argument": 48, "kept": 64}, "backward")),
    seconds=1.5,
    versions={"jax": "0.12.0"},
    key="abc",
)


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        CompileReport("cpu", crashed="the compiler died by SIGFPE"),
        CompileReport("tpu v5e:2x2", oom=OutOfMemory(17 * GIB, 16 * GIB, "device", "E1000")),
    ],
)
def test_json_both_ways(report):
    assert CompileReport.from_json(report.json()) == report


def test_sums():
    assert REPORT.device_bytes == 148
    assert REPORT.host_bytes == 10
    assert REPORT.sent() == 30
    assert REPORT.sent("fsdp") == 30  # groups along no axes may be along any
    assert REPORT.sent("data") == 6
    assert REPORT.sent(kind="all-gather") == 24


def test_what_does_not_fit_says_what_it_needs():
    report = CompileReport("tpu v5e:2x2", oom=OutOfMemory(17 * GIB, 16 * GIB, "device", "E1000"))
    assert report.device_bytes == 17 * GIB
    assert not report.fits(20 * GIB)
    assert "needs 17.00 GiB, but 16.00 GiB are available" in str(report)
    on_chip = dataclasses.replace(report, oom=OutOfMemory(72, 16, "on-chip", "E1001"))
    assert on_chip.device_bytes is None
    assert not on_chip.fits(20 * GIB)


def test_a_report_prints_its_parts():
    text = str(REPORT)
    assert all(word in text for word in ("148 B", "all-gather fsdp", "layers/mlp", "kept", "1234"))
    assert len(text.splitlines()) < 30
