"""Rates and memory sizes of TPUs, and the slice topologies that exist.

libtpu's compiler accepts some slices that do not exist (v5e:2x8 and 16x20), and crashes on others (v5e:0x4 ends in
SIGFPE). So topologies are checked against this table first. If sources differ, the table has the lower rate. Usable
memory is the "available HBM" in libtpu's out-of-memory message when a program is compiled ahead of time.
"""

import difflib
import functools
import math

from jaxscale.errors import UserError
from jaxscale.platforms.platform import Chip, GiB, Link

_BOOK = "How to Scale Your Model (jax-ml/scaling-book), tpus.md, tables of chips and interconnect"
_PROBE = "ahead-of-time compilation by libtpu: 'exceeds available HBM' of its CompileTimeHbmOom"
_JAX = "jax/_src/pallas/mosaic/tpu_info.py"


def _ici(bandwidth: float, links: int, source: str) -> Link:
    """Return the links of a chip in the torus. `bandwidth` is that of one link, in bytes/s in one direction."""
    return Link("ici", "a chip and its neighbors in the torus", bandwidth, "link", source, links=links)


def _pcie(bandwidth: float, source: str) -> Link:
    """Return the PCIe link between a chip and its host. `bandwidth` is in bytes/s in one direction."""
    return Link("pcie", "a chip and its host", bandwidth, "chip", source)


V4 = Chip(
    name="v4",
    kind="tpu",
    device_kinds=("TPU v4",),
    source=("Cloud TPU documentation, TPU v4: 275 TFLOP/s bf16 or int8, HBM2 32 GiB, 1200 GB/s", _PROBE, _BOOK),
    bfloat16=275e12,  # TPU v4 page
    int8=275e12,  # TPU v4 page
    memory=32 * GiB,  # TPU v4 page
    usable_memory=int(30.75 * GiB),  # probe, in megacore; 15.25 GiB for each core apart
    memory_bandwidth=1200e9,  # TPU v4 page
    clock=1.05e9,  # the peak with 2^17 products a cycle
    devices=1,  # megacore; ahead-of-time compilation lists two by default
    chips_per_host=4,  # scaling book: a host is 2x2x1
    links=(
        _ici(45e9, 6, f"{_BOOK}: v4p 4.5e10 bytes/s one way; 3D torus"),
        _pcie(15e9, f"{_BOOK}: typically 1.5e10 bytes/s per chip"),
        Link("dcn", "hosts", 25e9, "host", f"{_BOOK}: typically 2.5e10 bytes/s per host"),
    ),
)

V5E = Chip(
    name="v5e",
    kind="tpu",
    device_kinds=("TPU v5 lite", "TPU v5e"),
    source=(
        "Cloud TPU documentation, TPU v5e: 197 TFLOP/s bf16, 393 TOP/s int8, 16 GB, 819 GB/s, ICI 400 GB/s both ways",
        "Cloud TPU documentation, TPU v5e, earlier table: 8 chips and 512 GiB DRAM per host, 2 x 100 Gbps NIC",
        _PROBE,
    ),
    bfloat16=197e12,  # TPU v5e page
    int8=393e12,  # TPU v5e page
    memory=16 * GiB,  # TPU v5e page
    usable_memory=int(15.75 * GiB),  # probe
    memory_bandwidth=819e9,  # TPU v5e page
    clock=1.5e9,  # scaling book; the peak with 2^16 products a cycle
    chips_per_host=8,  # TPU v5e page
    host_memory=512 * GiB,  # TPU v5e page
    links=(
        _ici(50e9, 4, "Cloud TPU documentation, TPU v5e: 4 ICI ports, 400 GB/s both ways per chip"),
        _pcie(15e9, f"{_BOOK}: typically 1.5e10 bytes/s per chip"),
        Link("dcn", "hosts", 25e9, "host", "Cloud TPU documentation, TPU v5e: 2 x 100 Gbps NIC per host"),
    ),
)

V5P = Chip(
    name="v5p",
    kind="tpu",
    device_kinds=("TPU v5", "TPU v5p"),
    source=(
        "Cloud TPU documentation, TPU v5p: 459 TFLOP/s bf16 and fp8, 2765 GB/s, ICI 1200 GB/s both ways, RAM 448 GB",
        f"{_JAX}: 103e9 bytes of HBM (the page says 95 GiB, less than what the compiler grants), int8 918 TOP/s",
        _PROBE,
    ),
    bfloat16=459e12,  # TPU v5p page
    float8=459e12,  # TPU v5p page
    int8=918e12,  # tpu_info.py, scaling book
    memory=96 * GiB,  # tpu_info.py
    usable_memory=int(95.73 * GiB),  # probe
    memory_bandwidth=2765e9,  # TPU v5p page; tpu_info.py has 2.46e12
    clock=1.75e9,  # the peak with 2^17 products a cycle
    devices=1,  # megacore
    chips_per_host=4,  # TPU v5p page: 64 chips, 16 hosts
    host_memory=448 * 10**9,  # TPU v5p page
    links=(
        _ici(100e9, 6, "Cloud TPU documentation, TPU v5p: 1200 GB/s both ways per chip; 3D torus"),
        _pcie(15e9, f"{_BOOK}: typically 1.5e10 bytes/s per chip"),
        Link("dcn", "hosts", 6.25e9, "chip", "Cloud TPU documentation, TPU v5p: DCN 50 Gbps per chip"),
    ),
)

V6E = Chip(
    name="v6e",
    kind="tpu",
    device_kinds=("TPU v6 lite", "TPU v6e"),
    source=(
        "Cloud TPU documentation, TPU v6e: 918 TFLOP/s bf16, 1836 TOP/s int8, 32 GB HBM, 8 chips and 1536 GiB per host",
        "Cloud TPU documentation, TPU7x, table of generations: v6e fp8 918 TFLOP/s, 1638 GB/s, ICI 800 GB/s both ways",
        _PROBE,
    ),
    bfloat16=918e12,  # TPU v6e page
    float8=918e12,  # TPU7x page
    int8=1836e12,  # TPU v6e page
    memory=32 * GiB,  # TPU7x page, in GiB
    usable_memory=int(31.24 * GiB),  # probe
    memory_bandwidth=1638e9,  # TPU7x page
    clock=1.75e9,  # the peak with 2^18 products a cycle
    chips_per_host=8,  # TPU v6e page
    host_memory=1536 * GiB,  # TPU v6e page
    links=(
        _ici(100e9, 4, "Cloud TPU documentation, TPU v6e: 4 ICI ports, 800 GB/s both ways per chip"),
        _pcie(32e9, f"{_BOOK}: Trillium has 32 GB/s"),
        Link("dcn", "hosts", 100e9, "host", "Cloud TPU documentation, TPU v6e: 4 x 200 Gbps NIC per host"),
    ),
)

V7X = Chip(
    name="7x",
    kind="tpu",
    device_kinds=("TPU7x",),
    source=(
        "Cloud TPU documentation, TPU7x (Ironwood): 2307 TFLOP/s bf16, 4614 fp8, 192 GiB, 7380 GB/s, RAM 960 GB; the "
        "page does not specify the link to the host; plans assume the slowest of the tables",
        _PROBE,
    ),
    bfloat16=2307e12,  # TPU7x page
    float8=4614e12,  # TPU7x page
    memory=192 * GiB,  # TPU7x page
    usable_memory=int(189.48 * GiB),  # probe: 94.74 GiB for each of the two devices
    memory_bandwidth=7380e9,  # TPU7x page
    clock=2.2e9,  # the peak with 2^18 products a cycle of a device
    devices=2,  # TPU7x page: two devices a chip instead of one logical core
    chips_per_host=4,  # TPU7x page
    host_memory=960 * 10**9,  # TPU7x page
    links=(
        _ici(100e9, 6, "Cloud TPU documentation, TPU7x: 1200 GB/s both ways per chip; 3D torus"),
        Link("dcn", "hosts", 12.5e9, "chip", "Cloud TPU documentation, TPU7x: DCN 100 Gb/s per chip"),
    ),
)

TPUS = (V4, V5E, V5P, V6E, V7X)
ALIASES = {"tpu7x": "7x", "v7x": "7x", "ironwood": "7x", "trillium": "v6e"}
"""The name of the chip, by each other name that the text of a platform may use."""

# Cloud TPU documentation, TPU v5e and TPU v6e, "supported configurations"
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# Cloud TPU documentation, TPU v5p, single-slice shapes; TPU types and topologies: v4 2x2x4
_SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
# largest slice in chips: TPU v4 page (pod), TPU v5p page (largest job), TPU7x page (pod)
_LARGEST = {"v4": 4096, "v5p": 6144, "7x": 9216}


@functools.cache
def topologies(name: str) -> tuple[tuple[int, ...], ...]:
    """Return the topologies of all slices of the TPU with this chip name, from the smallest to the largest.

    Two-dimensional slices (v5e, v6e) are listed in a table. Three-dimensional slices (v4, v5p, 7x) are four small
    slices, and all slices A x B x C up to the largest size, where A <= B <= C are multiples of 4 (Cloud TPU
    documentation, TPU types and topologies).

    Example:
        >>> topologies("v5e")[:4]
        ((1, 1), (2, 2), (2, 4), (4, 4))
        >>> (16, 16, 24) in topologies("v5p"), (4, 2, 4) in topologies("v5p")
        (True, False)
    """
    if name not in _LARGEST:
        return _FLAT
    max_chips = _LARGEST[name]
    large_topologies = [
        (a, b, c)
        for a in range(4, 25, 4)
        for b in range(a, max_chips // (a * a) + 1, 4)
        for c in range(b, max_chips // (a * b) + 1, 4)
    ]
    return _SMALL + tuple(sorted(large_topologies, key=lambda topology: (math.prod(topology), topology)))


def check_topology(name: str, topology: tuple[int, ...]) -> None:
    """Raise UserError if a TPU has no slice of this topology. The TPU is given by the chip's name.

    Raises:
        UserError: the topology is not in `topologies(name)`; the message suggests similar topologies.
    """
    existing_topologies = topologies(name)
    if topology in existing_topologies:
        return
    chip_count = math.prod(topology)
    topology_text = "x".join(map(str, topology))
    count_by_text = {
        "x".join(map(str, existing_topology)): math.prod(existing_topology) for existing_topology in existing_topologies
    }
    same_size_texts = [text for text, count in count_by_text.items() if count == chip_count]
    nearest_counts = sorted(set(count_by_text.values()), key=lambda count: abs(count - chip_count))[:2]
    comparable_texts = [text for text, count in count_by_text.items() if chip_count <= 2 * count <= 4 * chip_count]
    similar_texts = difflib.get_close_matches(topology_text, comparable_texts)
    nearest_texts = [text for text, count in count_by_text.items() if count in nearest_counts]
    suggestions = same_size_texts or similar_texts[:2] or nearest_texts
    expected_text = ", ".join(count_by_text)
    if name in _LARGEST:
        expected_text = "2x2x1, 2x2x2, 2x2x4, 2x4x4, or multiples of 4 in rising order"
    raise UserError(
        f"tpu {name} has no slice {topology_text} ({chip_count} chips): expected {expected_text}; did you mean "
        f"{' or '.join(f'tpu {name}:{text}' for text in suggestions[:3])}?"
    )
