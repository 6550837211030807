"""The peer of `vision_peer.py`: a vision transformer and a ResNet-18 in eager PyTorch, trained with AdamW.

    python experiments/benchmarks/vision_torch.py NAME STEPS THREADS      needs torch

It uses nothing of jaxscale. Its last line is one JSON object: seconds of each step, wall and processor.
"""

import argparse
import json
import os
import time

# torch is no dependency: it is measured where it happens to be
# pyright: reportMissingImports=false
import torch
from torch import nn
from torch.nn import functional

CASES = {
    "ViT 6 x 256": {"batch": 32, "layers": 6, "embed": 256, "heads": 4, "patch": 4, "image": 32, "classes": 10},
    "ResNet-18": {"batch": 32, "stages": (2, 2, 2, 2), "width": 64, "image": 32, "classes": 10},
    "tiny ViT": {"batch": 4, "layers": 2, "embed": 32, "heads": 2, "patch": 8, "image": 16, "classes": 10},
}
"""The sizes of each case, of both sides."""


class Layer(nn.Module):
    """Attention and mlp, before each a norm."""

    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(embed), nn.LayerNorm(embed)
        self.qkv, self.out = nn.Linear(embed, 3 * embed), nn.Linear(embed, embed)
        self.up, self.down = nn.Linear(embed, 4 * embed), nn.Linear(4 * embed, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layer."""
        rows, tokens, embed = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, embed))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches, learned positions, layers, the mean of the patches, a classifier."""

    def __init__(self, layers: int, embed: int, heads: int, patch: int, image: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, embed, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, embed))
        self.layers = nn.Sequential(*(Layer(embed, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(embed), nn.Linear(embed, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the classes."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(x)).mean(1))


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norms beside the input, which a 1 x 1 convolution adapts if it must."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.adapt = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.adapt = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.adapt(x))


class ResNet(nn.Module):
    """A 3 x 3 convolution, stages of residual blocks, the mean of the pixels, a classifier."""

    def __init__(self, stages: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        blocks, channels = [], width
        for stage, count in enumerate(stages):
            for block in range(count):
                blocks.append(Residual(channels, width << stage, 2 if stage and not block else 1))
                channels = width << stage
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the classes."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def main() -> None:
    """Train on random images, and print what the steps took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CASES)
    parser.add_argument("steps", type=int)
    parser.add_argument("threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    sizes = dict(CASES[arguments.name])
    batch = sizes.pop("batch")
    images, labels = torch.rand(batch, 3, sizes["image"], sizes["image"]), torch.randint(sizes["classes"], (batch,))
    if "patch" in sizes:
        model = ViT(**sizes)
    else:  # the layout that PyTorch computes convolutions fastest in
        model = ResNet(sizes["stages"], sizes["width"], sizes["classes"]).to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    seconds: dict[str, list[float]] = {"wall": [], "processor": []}
    loss = torch.zeros(())
    for _ in range(arguments.steps):
        start = time.perf_counter(), time.process_time()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds["wall"].append(time.perf_counter() - start[0])
        seconds["processor"].append(time.process_time() - start[1])
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({**seconds, "loss": float(loss.detach()), "parameters": parameter_count}))


if __name__ == "__main__":
    main()
