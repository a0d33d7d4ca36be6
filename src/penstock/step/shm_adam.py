"""Adam as a region of a fused pass, tile by tile: torch's own kernel, or plain operations.

`FusedAdam` is what `torch.optim.Adam(fused=True)` computes, `EagerAdam` what the default one does,
each to the bit: the same operations on fewer elements at a time. (But torch's fused kernel rounds
otherwise in a last vector that is not full. So parts that are no multiple of 16 elements differ
there in the last bit.) The second is for where the kernel is not (other types, an older torch); it
makes several trips through the second cache instead of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EagerAdam", "FusedAdam"]


class FusedAdam:
    """Adam by the kernel that torch's fused optimizer uses. State: exp_avg, exp_avg_sq."""

    def __init__(
        self,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.step = torch.zeros(())
        """Steps so far: a tensor, as the kernel and torch's state have it."""
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def begin(self) -> None:
        """Count a step."""
        self.step += 1

    def __call__(self, grad: Tensor, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Update one tile."""
        self._kernel(
            [weight],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [self.step],
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


class EagerAdam:
    """Adam by plain operations, in the order of torch's default. State: exp_avg, exp_avg_sq."""

    def __init__(
        self,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.step, self._decoupled = 0, decoupled
        self._scratch = torch.empty(0)
        self._decayed = torch.empty(0)

    def begin(self) -> None:
        """Count a step."""
        self.step += 1

    def __call__(self, grad: Tensor, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Update one tile."""
        beta1, beta2 = self.betas
        if self._scratch.numel() < grad.numel():
            self._scratch, self._decayed = torch.empty_like(grad), torch.empty_like(grad)
        if self.weight_decay and self._decoupled:
            weight.mul_(1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            # In a place of its own: the gradient may be what other ranks still read.
            decayed = self._decayed[: grad.numel()]
            grad = torch.add(grad, weight, alpha=self.weight_decay, out=decayed)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = torch.sqrt(exp_avg_sq, out=self._scratch[: grad.numel()])
        denominator.div_((1 - beta2**self.step) ** 0.5).add_(self.eps)
        weight.addcdiv_(exp_avg, denominator, value=-self.lr / (1 - beta1**self.step))
