"""The training steps that `gpu_feed` feeds: ResNet-50 and GPT-2-small, eager, bf16."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 50_304
"""GPT-2's 50,257 tokens, rounded up to a multiple of 64 as everybody does."""

Step = Callable[..., None]
"""Launches forward, backward and update of one batch; does not wait for the device."""


def image_step(device: str, *, quick: bool) -> Step:
    """Return a step on images uint8[n, 3, side, side] and labels int64[n]."""
    import torchvision

    make = torchvision.models.resnet18 if quick else torchvision.models.resnet50
    model = make().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        pixels = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16):
            loss = functional.cross_entropy(model(pixels.to(torch.bfloat16).div_(255)), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.norms[1](x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 with as many layers, of such a width, as is said; small is 12 of 768."""

    def __init__(self, *, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))


def token_step(device: str, *, context: int, quick: bool) -> Step:
    """Return a step on rows int32[n, context]."""
    size = {"layers": 1, "width": 64} if quick else {"layers": 12, "width": 768}
    model = Gpt(context=context, **size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=device == "cuda")

    def step(rows: torch.Tensor) -> None:
        ids = rows.long()
        with torch.autocast(device, torch.bfloat16):
            guesses = model(ids[:, :-1])
            loss = functional.cross_entropy(guesses.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step
