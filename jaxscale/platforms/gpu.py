"""Rates and memory sizes of NVIDIA GPUs: dense rates of the tensor cores, and of the CUDA cores for float32.

NVIDIA's datasheets print rates "with sparsity"; this table has the dense rates, which are half as high. Memory sizes
are those of the datasheets, in units of 10^9 bytes. The network between hosts depends on the site. The table has the
network of NVIDIA's DGX machines; the text of a platform may specify another rate ("gpu h100 x 16 over 100Gb/s"). The
datasheets are quoted from other sites: T4 and H100 from hpctech.co.jp, A100, H100 and B200 from
glennklockwood.com/garden/processors, variants of A100 from thundercompute.com, L4 from hmc-tech.com, H200 from
aiwiki.ai, DGX B200 from NVIDIA's AIPS wiki.
"""

import dataclasses

from jaxscale.platforms.platform import Chip, Link

_A100 = "NVIDIA A100 Tensor Core GPU datasheet: bf16 and fp16 312, TF32 156, FP32 19.5 TFLOP/s, int8 624 TOP/s"
_H100 = "NVIDIA H100 datasheet, sparse: SXM bf16 1979, TF32 989, fp8 3958, FP32 67; PCIe 1513, 756, 3026, 51 (TFLOP/s)"
_B200 = "NVIDIA B200, glennklockwood.com, HGX at 1000 W: bf16 2250, TF32 1100, fp8 and int8 4500, FP32 80 (dense)"


def _nvlink(bandwidth: float, source: str, connects: str = "GPUs of one host, through NVSwitch") -> Link:
    """Return the NVLink of a GPU. `bandwidth` is in bytes/s in one direction, over all NVLinks of the GPU together."""
    return Link("nvlink", connects, bandwidth, "chip", source)


def _pcie(bandwidth: float, source: str) -> Link:
    """Return the PCIe link between a GPU and its host. `bandwidth` is in bytes/s in one direction."""
    return Link("pcie", "a GPU and its host", bandwidth, "chip", source)


_PCIE3 = _pcie(16e9, "NVIDIA T4 datasheet: PCIe 3.0 x16, 32 GB/s both ways")
_PCIE4 = _pcie(32e9, "NVIDIA A100 and L4 datasheets: PCIe Gen4 x16, 64 GB/s both ways")
_PCIE5 = _pcie(64e9, "NVIDIA H100 datasheet: PCIe Gen5, 128 GB/s both ways")
_NVLINK3 = _nvlink(300e9, "NVIDIA A100 datasheet: NVLink 600 GB/s both ways")
_CONNECTX7 = Link(
    "dcn", "hosts", 50e9, "chip", "NVIDIA DGX H100 and H200 datasheets: 8 GPUs, 8 x ConnectX-7 of 400 Gb/s"
)
_NVLINK4 = _nvlink(450e9, "NVIDIA H100 and H200 datasheets: NVLink 900 GB/s both ways")

T4 = Chip(
    name="t4",
    kind="gpu",
    device_kinds=("Tesla T4",),
    source=(
        "NVIDIA T4 datasheet: FP16 65, FP32 8.1 TFLOP/s, int8 130 TOP/s, 16 GB GDDR6; 256 bit x 10 Gb/s = 320 GB/s",
    ),
    float16=65e12,  # datasheet; Turing's tensor cores have no bfloat16
    float32=8.1e12,  # datasheet
    int8=130e12,  # datasheet
    memory=16 * 10**9,  # datasheet
    memory_bandwidth=320e9,  # datasheet's bus: 256 bit at 10 Gb/s a pin
    links=(_PCIE3,),
)

L4 = Chip(
    name="l4",
    kind="gpu",
    device_kinds=("NVIDIA L4",),
    source=("NVIDIA L4 datasheet, sparse: bf16 242, TF32 120, fp8 and int8 485; FP32 30.3 TFLOP/s, 24 GB, 300 GB/s",),
    bfloat16=121e12,  # datasheet, halved
    float16=121e12,  # datasheet, halved
    tf32=60e12,  # datasheet, halved
    float32=30.3e12,  # datasheet
    float8=242.5e12,  # datasheet, halved
    int8=242.5e12,  # datasheet, halved
    memory=24 * 10**9,  # datasheet
    memory_bandwidth=300e9,  # datasheet
    links=(_PCIE4,),
)


def _a100(
    name: str, device_kinds: tuple[str, ...], memory: int, bandwidth: float, links: tuple[Link, ...], **fields: int
) -> Chip:
    """Return a variant of A100.

    Args:
        name: name of the chip.
        device_kinds: `jax.Device.device_kind` of the chip's devices.
        memory: bytes of device memory.
        bandwidth: bytes/s between the memory and the chip.
        links: links of the chip and of its host.
        fields: further fields of `Chip`.
    """
    return Chip(
        name=name,
        kind="gpu",
        device_kinds=device_kinds,
        source=(_A100, f"NVIDIA A100 datasheet, {name}: {memory // 10**9} GB at {bandwidth / 1e9:.0f} GB/s"),
        bfloat16=312e12,  # datasheet
        float16=312e12,  # datasheet
        tf32=156e12,  # datasheet
        float32=19.5e12,  # datasheet
        int8=624e12,  # datasheet
        memory=memory,
        memory_bandwidth=bandwidth,
        links=links,
        **fields,
    )


A100_40 = _a100(
    "a100-40", ("NVIDIA A100-SXM4-40GB",), 40 * 10**9, 1555e9, (_NVLINK3, _PCIE4), chips_per_host=8
)  # DGX A100
A100_80 = _a100(
    "a100-80", ("NVIDIA A100-SXM4-80GB",), 80 * 10**9, 2039e9, (_NVLINK3, _PCIE4), chips_per_host=8
)  # DGX A100
A100_40_PCIE = _a100("a100-40-pcie", ("NVIDIA A100-PCIE-40GB",), 40 * 10**9, 1555e9, (_PCIE4,))
A100_80_PCIE = _a100("a100-80-pcie", ("NVIDIA A100 80GB PCIe",), 80 * 10**9, 1935e9, (_PCIE4,))

H100 = Chip(
    name="h100",
    kind="gpu",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    source=(_H100, "NVIDIA H100 datasheet, SXM: 80 GB, 3.35 TB/s"),
    bfloat16=989.4e12,  # datasheet, halved
    float16=989.4e12,  # datasheet, halved
    tf32=494.7e12,  # datasheet, halved
    float32=66.9e12,  # datasheet
    float8=1978.9e12,  # datasheet, halved
    int8=1978.9e12,  # datasheet, halved
    memory=80 * 10**9,  # datasheet
    memory_bandwidth=3.35e12,  # datasheet
    chips_per_host=8,  # DGX and HGX H100
    links=(_NVLINK4, _PCIE5, _CONNECTX7),
)

H100_PCIE = Chip(
    name="h100-pcie",
    kind="gpu",
    device_kinds=("NVIDIA H100 PCIe",),
    source=(_H100, "NVIDIA H100 datasheet, PCIe: 80 GB, 2 TB/s"),
    bfloat16=756.5e12,  # datasheet, halved
    float16=756.5e12,  # datasheet, halved
    tf32=378e12,  # datasheet, halved
    float32=51e12,  # datasheet
    float8=1513e12,  # datasheet, halved
    int8=1513e12,  # datasheet, halved
    memory=80 * 10**9,  # datasheet
    memory_bandwidth=2e12,  # datasheet
    links=(_nvlink(300e9, "NVIDIA H100 datasheet, PCIe: NVLink 600 GB/s both ways", "two GPUs, by a bridge"), _PCIE5),
)

H200 = dataclasses.replace(  # an HGX H200 has as many chips and the same links as an HGX H100
    H100,
    name="h200",
    device_kinds=("NVIDIA H200",),
    source=("NVIDIA H200 datasheet: 141 GB HBM3e, 4.8 TB/s; rates as H100 SXM", _H100),
    memory=141 * 10**9,  # datasheet
    memory_bandwidth=4.8e12,  # datasheet
)

B200 = Chip(
    name="b200",
    kind="gpu",
    device_kinds=("NVIDIA B200",),
    source=(_B200, "NVIDIA DGX B200 datasheet: 8 GPUs, 1440 GB, 64 TB/s HBM3e, 14.4 TB/s NVLink in all"),
    bfloat16=2250e12,  # glennklockwood.com
    float16=2250e12,  # glennklockwood.com
    tf32=1100e12,  # glennklockwood.com
    float32=80e12,  # glennklockwood.com
    float8=4500e12,  # glennklockwood.com
    int8=4500e12,  # glennklockwood.com
    memory=180 * 10**9,  # DGX B200 datasheet: 1440 GB / 8
    memory_bandwidth=8e12,  # DGX B200 datasheet: 64 TB/s / 8
    chips_per_host=8,  # DGX B200 datasheet
    links=(
        _nvlink(900e9, "NVIDIA DGX B200 datasheet: 1.8 TB/s a GPU, both ways"),
        _pcie(64e9, "NVIDIA DGX B200 user guide: hosts are PCIe Gen5, as those of H100; the GPU itself has Gen6"),
    ),
)

GPUS = (T4, L4, A100_40, A100_80, A100_40_PCIE, A100_80_PCIE, H100, H100_PCIE, H200, B200)
ALIASES = {"a100": "a100-80", "a100-pcie": "a100-80-pcie", "h100-sxm": "h100"}
"""The name of the chip, by each other name that the text of a platform may use."""
