"""The nets: ResNet-9 for CIFAR-10, a small convolutional net for a CPU, a linear one for tests."""

import torch
from torch import Tensor, nn


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv(width, width), *conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def resnet9(channels: int, width: int = 64) -> nn.Module:
    """The net that David Page trained in seconds: eight convolutions, two residual blocks."""
    return nn.Sequential(
        *conv(channels, width),
        *conv(width, 2 * width),
        nn.MaxPool2d(2),
        Residual(2 * width),
        *conv(2 * width, 4 * width),
        nn.MaxPool2d(2),
        *conv(4 * width, 8 * width),
        nn.MaxPool2d(2),
        Residual(8 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, 10, bias=False),
        Scale(0.125),
    )


def small(channels: int, width: int = 16) -> nn.Module:
    """Two convolutions with strides and two linear layers: a second for 10,000 images and core."""
    return nn.Sequential(
        *conv(channels, width, size=5, stride=2),
        *conv(width, 2 * width, stride=2),
        nn.Flatten(),
        nn.LazyLinear(128),
        nn.ReLU(inplace=True),
        nn.Linear(128, 10),
    )


def linear(channels: int, width: int = 1) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


MODELS = {"resnet9": resnet9, "small": small, "linear": linear}


def model_of(name: str, example: Tensor, *, width: int | None, seed: int) -> nn.Module:
    """A net whose first weights depend on nothing but its shape and the seed."""
    torch.manual_seed(seed)
    options = {} if width is None else {"width": width}
    model = MODELS[name](example.shape[1], **options)
    model.eval()
    with torch.no_grad():
        model(example)  # lazy layers take their shape and their weights here
    return model.train()
