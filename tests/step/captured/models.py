"""Modules of torch as anybody writes them, and a training step of two of them as a program."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import penstock.step as ps

TOKENS, WIDTH, HEADS, CLASSES = 6, 16, 2, 5


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        heads = self.qkv(self.norm(x)).view(b, t, 3 * HEADS, d // HEADS).transpose(1, 2)
        q, k, v = heads.chunk(3, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(x)


class Head(nn.Module):
    """A loss for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(WIDTH, CLASSES)

    def forward(self, h: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.classes(h.mean(1)), label, reduction="none")


class Residual(nn.Module):
    """A small network of convolutions, with operations in place and statistics that stand still."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.group = nn.GroupNorm(2, 8)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.first(x)))
        x = functional.max_pool2d(x, 2)
        x = self.act(x + self.group(self.second(x)))
        return self.head(x.mean((2, 3)))


def adam(w: Any, m: Any, v: Any, g: Any, t: Any, lr: Any) -> Any:
    """Write down one step of Adam, and return the new weights."""
    m = ps.update(m, 0.9 * m + 0.1 * g)
    v = ps.update(v, 0.999 * v + 0.001 * g * g)
    return ps.update(w, w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))


def training(block: Any, head: Any) -> ps.Template:
    """Return the data parallel step of a block and its head."""

    @ps.program
    def train(
        w1: ps.R["n"], m1: ps.R["n"], v1: ps.R["n"], w2: ps.R["k"], m2: ps.R["k"], v2: ps.R["k"],
        t, lr,
    ):  # fmt: skip
        x = ps.load("data.x", ps.S(0)["batch", TOKENS, WIDTH])
        label = ps.load("data.label", ps.S(0)["batch", ps.i64])
        loss = ps.mean(head(block(x, w1), label, w2))
        s1, s2 = ps.grad(loss, (w1, w2))
        g2 = ps.all_reduce(s2)
        g1 = ps.all_reduce(s1)
        w2 = adam(w2, m2, v2, g2, t, lr)
        w1 = adam(w1, m1, v1, g1, t, lr)
        return ps.all_reduce(loss)

    return train
