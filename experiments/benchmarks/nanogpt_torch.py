"""The peer a newcomer would pick instead: nanoGPT's documented recipe for a CPU in eager PyTorch, on our text.

    python experiments/benchmarks/nanogpt_torch.py [--text FILE] [--steps 2000] [--seed 1337]      needs torch

By default 4 layers, 4 heads, 128 wide, context 64, batch 12; dropout 0; AdamW 1e-3 to 1e-4 (cosine, warm-up 100), betas
0.9 and 0.99, weight decay 0.1 on matrices, clip 1. Its last line is one JSON object. It uses nothing of jaxscale.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

# torch is no dependency: it is measured where it happens to be
# pyright: reportMissingImports=false
import torch
from torch import nn
from torch.nn import functional

TEXT = Path(__file__).resolve().parent.parent / "data" / "shakespeare.txt"


class Block(nn.Module):
    """Attention and mlp, before each a norm."""

    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(embed, bias=False), nn.LayerNorm(embed, bias=False)
        self.qkv, self.out = nn.Linear(embed, 3 * embed, bias=False), nn.Linear(embed, embed, bias=False)
        self.up, self.down = nn.Linear(embed, 4 * embed, bias=False), nn.Linear(4 * embed, embed, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream after the block."""
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(d, 2)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Embedding, blocks, norm, tied head."""

    def __init__(self, vocab: int, context: int, layers: int, embed: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocab, embed), nn.Embedding(context, embed)
        self.blocks = nn.ModuleList(Block(embed, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(embed, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                small = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, 0, 0.02 / (math.sqrt(2 * layers) if small else 1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean nats per target."""
        h = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            h = block(h)
        logits = self.norm(h) @ self.embedding.weight.T
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def main() -> None:
    """Train, then print what it took and the held-out loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--threads", type=int, default=0, help="1: one core as well (default: torch's)")
    for name, value in (("layers", 4), ("embed", 128), ("heads", 4), ("context", 64), ("batch", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.threads == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    context, batch = args.context, args.batch
    text = args.text.read_text(encoding="utf-8")
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([index[c] for c in text])
    train, held_out = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    model = Model(len(index), context, args.layers, args.embed, args.heads)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    seconds: dict[str, list[float]] = {"wall": [], "processor": []}
    for i in range(args.steps):
        start = time.perf_counter(), time.process_time()
        cosine = 0.5 * (1 + math.cos(math.pi * (i - 100) / max(args.steps - 100, 1)))
        rate = 1e-3 * (i + 1) / 101 if i < 100 else 1e-4 + cosine * 9e-4
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = torch.randint(len(train) - context, (batch,))
        x = torch.stack([train[j : j + context] for j in at])
        y = torch.stack([train[j + 1 : j + context + 1] for j in at])
        model(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds["wall"].append(time.perf_counter() - start[0])
        seconds["processor"].append(time.process_time() - start[1])
    window = held_out[: (len(held_out) - 1) // context * context + 1]
    x, y = window[:-1].view(-1, context), window[1:].view(-1, context)
    with torch.no_grad():
        total = sum(float(model(a, b)) * len(a) for a, b in zip(x.split(64), y.split(64), strict=True))
    print(json.dumps({"torch": torch.__version__, **seconds, "held_out": total / len(x)}))


if __name__ == "__main__":
    main()
