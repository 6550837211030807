"""The peer a newcomer would pick instead: nanoGPT's documented recipe for a CPU in eager PyTorch, on our text.

    python experiments/benchmarks/nanogpt_torch.py [--text FILE] [--steps 2000] [--seed 1337]      needs torch

4 layers, 4 heads, 128 wide, context 64, batch 12, dropout 0; AdamW 1e-3 to 1e-4 (cosine, warm-up 100), betas 0.9 and
0.99, weight decay 0.1 on matrices, clip 1. Its last line is one JSON object. It uses nothing of jaxscale.
"""

import argparse
import json
import math
import time
from pathlib import Path

# torch is no dependency: it is measured where it happens to be
# pyright: reportMissingImports=false
import torch
from torch import nn
from torch.nn import functional

BATCH, CONTEXT, EMBED, LAYERS, HEADS = 12, 64, 128, 4, 4
TEXT = Path(__file__).resolve().parent.parent / "data" / "shakespeare.txt"


class Block(nn.Module):
    """Attention and mlp, before each a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(EMBED, bias=False), nn.LayerNorm(EMBED, bias=False)
        self.qkv, self.out = nn.Linear(EMBED, 3 * EMBED, bias=False), nn.Linear(EMBED, EMBED, bias=False)
        self.up, self.down = nn.Linear(EMBED, 4 * EMBED, bias=False), nn.Linear(4 * EMBED, EMBED, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream after the block."""
        b, t, _ = x.shape
        heads = self.qkv(self.norm1(x)).split(EMBED, 2)
        q, k, v = (z.view(b, t, HEADS, EMBED // HEADS).transpose(1, 2) for z in heads)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, EMBED))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Embedding, blocks, norm, tied head."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocab, EMBED), nn.Embedding(CONTEXT, EMBED)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(EMBED, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                small = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, 0, 0.02 / (math.sqrt(2 * LAYERS) if small else 1))

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
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    text = args.text.read_text(encoding="utf-8")
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([index[c] for c in text])
    train, held_out = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    model = Model(len(index))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    seconds = []
    for i in range(args.steps):
        start = time.perf_counter()
        cosine = 0.5 * (1 + math.cos(math.pi * (i - 100) / max(args.steps - 100, 1)))
        rate = 1e-3 * (i + 1) / 101 if i < 100 else 1e-4 + cosine * 9e-4
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = torch.randint(len(train) - CONTEXT, (BATCH,))
        x = torch.stack([train[j : j + CONTEXT] for j in at])
        y = torch.stack([train[j + 1 : j + CONTEXT + 1] for j in at])
        model(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    window = held_out[: (len(held_out) - 1) // CONTEXT * CONTEXT + 1]
    x, y = window[:-1].view(-1, CONTEXT), window[1:].view(-1, CONTEXT)
    with torch.no_grad():
        total = sum(float(model(a, b)) * len(a) for a, b in zip(x.split(64), y.split(64), strict=True))
    middle = sorted(seconds[20:] or seconds)[len(seconds[20:] or seconds) // 2]
    told = {"torch": torch.__version__, "tokens_per_second": BATCH * CONTEXT / middle, "held_out": total / len(x)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
