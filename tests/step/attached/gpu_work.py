"""What ranks on GPUs do for the tests of `attach`; each returns what was wrong.

Apart from the tests so that it can be run where there is a GPU and no pytest:

    python -m tests.step.attached.gpu_work

All of it can be done on the host as well, over gloo, which shows that the checks are right.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from tests.step.attached.cases import BATCH, OPTIMIZERS, batches, mlp, weights
from tests.step.attached.cases import attach_as_many as attach
from tests.step.ranks import RankError, run_ranks
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from penstock.errors import OptionError, StateError
from penstock.step.attached.attach import Attached
from penstock.step.attached.reshard import AHEAD
from penstock.step.groups import Groups
from penstock.step.program.mesh import mesh

STEPS = 20
SLEEP_CYCLES = 2_000_000_000
"""About a second of a GPU."""
NAP_CYCLES = 1_000_000
Data = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Place:
    """A device, what carries between ranks on it, and whether weights are kept in slices."""

    def __init__(self, rank: int, size: int, over: str, *, reshard: bool = False) -> None:
        self.rank, self.size, self.over, self.reshard = rank, size, over, reshard
        self.device = torch.device("cpu")
        if over != "gloo":
            torch.cuda.set_device(rank % torch.cuda.device_count())
            self.device = torch.device("cuda", torch.cuda.current_device())

    def groups(self) -> Groups:
        return Groups(mesh(dp=self.size), backend=self.over, shared="16MB")

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        return mlp(dtype).to(self.device)

    def data(self, count: int, *, whole: bool = False, **options: Any) -> Data:
        """Yield a rank's part, or all that a process alone has; on the device beforehand."""
        part = () if whole else (self.rank, self.size)
        made = list(batches(count, *part, **options))
        return iter([(x.to(self.device), y.to(self.device)) for x, y in made])


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: Data,
    after: Callable[[], object] | None = None,
) -> None:
    for x, y in data:
        optimizer.zero_grad()
        (model(x).to(y.dtype) - y).square().mean().backward()
        if after is not None:
            after()
        optimizer.step()


def plain(place: Place, kind: str, steps: int, clip: float | None = None) -> torch.Tensor:
    """Return what one process makes of the same batches, on the same device."""
    model = place.model()
    optimizer = OPTIMIZERS[kind](model.parameters())

    def clipped() -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    train(model, optimizer, place.data(steps, whole=True), clipped)
    return weights(model)


@contextmanager
def attached_to(
    place: Place, model: nn.Module, optimizer: Optimizer, **options: Any
) -> Iterator[Attached]:
    """Attach, by default over NCCL as users do; the attached one is closed at the end."""
    options = {"reshard": place.reshard} | options
    if place.over == "nccl":
        with attach(model, optimizer, **options) as attached:
            yield attached
        return
    with place.groups() as groups, attach(model, optimizer, groups, **options) as attached:
        yield attached


def differs(name: str, found: torch.Tensor, wanted: torch.Tensor, most: float) -> list[str]:
    off = float((found - wanted).abs().max() / (1 + wanted.abs().max()))
    return [] if off <= most else [f"{name}: off by {off:.1e}, at most {most:.0e}"]


# -- values ------------------------------------------------------------------------------------


def optimizers(place: Place) -> list[str]:
    """Train with each, unclipped and clipped."""
    wrong = []
    for kind, clip in [*((kind, None) for kind in OPTIMIZERS), ("adam", 0.3), ("lamb", 0.3)]:
        model = place.model()
        optimizer = OPTIMIZERS[kind](model.parameters())
        with attached_to(place, model, optimizer, buckets=512, clip=clip):
            train(model, optimizer, place.data(STEPS))
            made = weights(model)
        name = f"{kind} with clip={clip}"
        wrong += differs(name, made, plain(place, kind, STEPS, clip), 1e-10)
    return wrong


def norms(place: Place) -> list[str]:
    """Look at the norm of each step, and at what grad_norm is where nothing is clipped."""
    model, other = place.model(), place.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(other.parameters(), lr=0.1)
    found, wanted = [], []
    with attached_to(place, model, optimizer, clip=0.3) as attached:
        for mine, whole in zip(place.data(5), place.data(5, whole=True), strict=True):
            train(model, optimizer, iter([mine]))
            assert attached.grad_norm is not None
            found.append(attached.grad_norm * 1)

            def clipped() -> None:
                wanted.append(nn.utils.clip_grad_norm_(other.parameters(), 0.3))

            train(other, reference, iter([whole]), clipped)
    return differs("grad_norm", torch.stack(found), torch.stack(wanted).double(), 1e-10)


def halves(place: Place) -> list[str]:
    """Compute in bf16, and send bf16: near, and the same on all ranks."""
    wrong = []
    wanted = plain(place, "adam", STEPS)
    for options in ({"dtype": torch.bfloat16}, {"wire": "bf16"}):
        model = place.model(torch.float32)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        with attached_to(place, model, optimizer, buckets=512, **options) as attached:
            train(model, optimizer, place.data(STEPS, dtype=torch.float32))
            made = weights(model)
            low, high = made.cpu().clone(), made.cpu().clone()
            attached._lanes.control.all_reduce(low, op="min").wait()
            attached._lanes.control.all_reduce(high, op="max").wait()
            state = optimizer.state_dict()["state"][0]
        if not torch.equal(low, high):
            wrong.append(f"{options}: ranks differ")
        if state["exp_avg"].dtype != torch.float32 or state["exp_avg"].device != place.device:
            wrong.append(f"{options}: states are {state['exp_avg'].dtype}")
        wrong += differs(str(options), made, wanted, 0.05)
    return wrong


def accumulated(place: Place) -> list[str]:
    """Add up gradients of several backwards, in accumulate() and without, and throw some away."""
    wrong = []
    for is_said in (True, False):
        models = [place.model(), place.model()]
        made = [OPTIMIZERS["adam"](model.parameters()) for model in models]
        with attached_to(place, models[0], made[0], buckets=512) as attached:
            for is_plain, (model, optimizer) in enumerate(zip(models, made, strict=True)):
                data = list(place.data(12, whole=bool(is_plain)))
                for step in range(4):
                    (model(data[step][0] * 2) - 1).square().mean().backward()
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                    for part, (x, y) in enumerate(data[3 * step : 3 * step + 3]):
                        is_silent = is_said and part < 2 and not is_plain
                        with attached.accumulate() if is_silent else nullcontext():
                            (model(x) - y).square().mean().backward()
                    optimizer.step()
            wrong += differs(f"{is_said=}", weights(models[0]), weights(models[1]), 1e-10)
    return wrong


def saved(place: Place) -> list[str]:
    """Save, load into torch's own, load back in the middle, and go on alone after close()."""
    wrong = []
    for kind in ("nesterov", "adamw", "lamb"):
        model, other = place.model(), place.model()
        optimizer, reference = (OPTIMIZERS[kind](each.parameters()) for each in (model, other))
        with attached_to(place, model, optimizer, buckets=512):
            train(model, optimizer, place.data(5))
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            other.load_state_dict(kept[0])
            reference.load_state_dict(copy.deepcopy(kept[1]))
            train(model, optimizer, place.data(3, seed=7))  # to be forgotten
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            train(model, optimizer, place.data(5, seed=2))
            train(other, reference, place.data(5, whole=True, seed=2))
            wrong += differs(f"{kind}, loaded", weights(model), weights(other), 1e-10)
        for each, of in ((model, optimizer), (other, reference)):
            train(each, of, place.data(2, whole=True, seed=3))
        wrong += differs(f"{kind}, closed", weights(model), weights(other), 1e-10)
    return wrong


class Odd(nn.Module):
    """Tied, frozen and unused weights, two types, a layer in every other step, one on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.again, self.tied = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.tied.weight = self.again.weight
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.sometimes, self.never, self.out = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        self.double().to(device)
        self.wide = nn.Linear(9, 9).to(device)
        self.host = nn.Linear(2, 2).requires_grad_(False)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.tanh(self.again(torch.tanh(self.into(x)))))
        x = self.sometimes(self.frozen(x)) if self.count % 2 else self.frozen(x)
        self.count += 1
        return nn.functional.linear(x + self.wide(x.float()).to(x.dtype), self.out.weight)


def odd(place: Place) -> list[str]:
    wrong = []
    for kind in ("adam", "lamb"):
        models = [Odd(place.device), Odd(place.device)]
        made = [OPTIMIZERS[kind](model.parameters()) for model in models]
        with attached_to(place, models[0], made[0], buckets=512) as attached:
            train(models[0], made[0], place.data(8))
            train(models[1], made[1], place.data(8, whole=True))
            with attached.whole():
                of = [weights(model.to("cpu")) for model in copy.deepcopy(models)]
            steps = [
                [float(state["step"]) for _, state in sorted(each.state_dict()["state"].items())]
                for each in made
            ]
        wrong += differs(f"odd, {kind}", of[0], of[1], 1e-5)  # a part of it is in float32
        wrong += [] if steps[0] == steps[1] else [f"odd, {kind}: steps {steps[0]} not {steps[1]}"]
    return wrong


# -- order -------------------------------------------------------------------------------------


def wide(place: Place) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers).double().to(place.device)


def wide_data(place: Place, count: int, *, whole: bool) -> Data:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(BATCH, 256, generator=generator, dtype=torch.float64)
        x = x if whole else x.chunk(place.size)[place.rank]
        yield x.to(place.device), -x.to(place.device)


def in_disorder(place: Place) -> list[str]:
    """Let streams be late here and there, each rank at other places: what is not in order shows."""
    generator = torch.Generator().manual_seed(place.rank)

    def late(*_: object) -> None:
        if float(torch.rand((), generator=generator)) < 0.3 and place.device.type == "cuda":
            torch.cuda._sleep(NAP_CYCLES)

    wrong = []
    for kind, options in (("adam", {}), ("lamb", {"clip": 1.0}), ("adam", {"buckets": 1 << 15})):
        model, other = wide(place), wide(place)
        optimizer, reference = (OPTIMIZERS[kind](each.parameters()) for each in (model, other))
        for module in model.modules():
            module.register_forward_hook(late)
            module.register_full_backward_hook(late)
        with attached_to(place, model, optimizer, **{"buckets": 1 << 18} | options):
            train(model, optimizer, wide_data(place, STEPS, whole=False), late)
            made = weights(model)

        def clipped(of: nn.Module = other, is_clipped: bool = "clip" in options) -> None:
            if is_clipped:
                nn.utils.clip_grad_norm_(of.parameters(), 1.0)

        train(other, reference, wide_data(place, STEPS, whole=True), clipped)
        wrong += differs(f"late, {kind} {options}", made, weights(other), 1e-8)
    return wrong


def no_host_waits(place: Place) -> list[str]:
    """Make steps while the GPU is busy with something else: the host is through before it."""
    wrong = []
    for kind, options in (
        ("nesterov", {}),
        ("adamw", {"clip": 0.3}),
        ("lamb", {"clip": 0.3}),
        ("adam", {"dtype": torch.bfloat16}),
        ("adam", {"wire": "bf16"}),
    ):
        model = place.model(torch.float32)
        optimizer = OPTIMIZERS[kind](model.parameters())
        data = [list(place.data(count, dtype=torch.float32)) for count in (4, 2)]
        with attached_to(place, model, optimizer, buckets=2048, **options) as attached:
            train(model, optimizer, iter(data[0]))
            attached._lanes.control.barrier()
            with _busy(place) as is_busy:
                train(model, optimizer, iter(data[1]))
                attached.synchronize()
                if not is_busy():
                    wrong.append(f"{kind} {options}: the host has waited for the GPU")
    return wrong


@contextmanager
def _busy(place: Place) -> Iterator[Callable[[], bool]]:
    """Keep the GPU busy for a second, and raise where the host would wait for it."""
    if place.device.type != "cuda":
        yield lambda: True
        return
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    end = torch.cuda.current_stream().record_event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield lambda: not end.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


# -- slices ------------------------------------------------------------------------------------


def to_the_bit(place: Place) -> list[str]:
    """Compare with attach without slices."""
    wrong = []
    for kind, options in (("nesterov", {}), ("adamw", {}), ("adam", {"dtype": torch.bfloat16})):
        made = []
        for reshard in (False, True):
            model = place.model(torch.float32)
            optimizer = OPTIMIZERS[kind](model.parameters())
            ways = options | {"reshard": reshard, "buckets": 512}
            with attached_to(place, model, optimizer, **ways):
                train(model, optimizer, place.data(STEPS, dtype=torch.float32))
                with torch.no_grad():
                    model(next(place.data(1, dtype=torch.float32))[0])
                made.append(weights(model))
        if not torch.equal(*made):
            wrong.append(f"{kind} {options}: other values than without slices")
    return wrong


class Again(nn.Module):
    """A layer that is used twice, and some that a checkpoint computes once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.again = nn.Linear(7, 9), nn.Linear(9, 9)
        self.inner = nn.Sequential(nn.Linear(9, 9), nn.ReLU(inplace=True), nn.Linear(9, 9))
        self.more = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4)))
        self.out = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.again(torch.tanh(self.into(x))))
        x = checkpoint(self.inner, self.again(x), use_reentrant=False)
        return self.out(checkpoint(self.more, x, use_reentrant=True))


def uneven(place: Place) -> list[str]:
    """Let ranks evaluate as often as they like, and change weights by hand."""
    models = [Again().double().to(place.device) for _ in range(2)]
    made = [OPTIMIZERS["adam"](model.parameters()) for model in models]
    wrong = []
    with attached_to(place, models[0], made[0], buckets=256) as attached:
        for is_plain, (model, optimizer) in enumerate(zip(models, made, strict=True)):
            data = list(place.data(6, whole=bool(is_plain)))
            for number, (x, y) in enumerate(data):
                optimizer.zero_grad()
                for _ in range(1 + number % 2):  # the second comes after the first was sent
                    (model(x) - y).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    for _ in range(place.rank + 1):
                        model(x)
                    with nullcontext() if is_plain or number != 3 else attached.whole():
                        if number == 3:
                            model.again.weight.mul_(0.5)
        wrong += differs("uneven", weights(models[0]), weights(models[1]), 1e-10)
        try:
            models[0].out.weight.sum()
        except StateError as error:
            wrong += [] if "attached.whole()" in str(error) else [str(error)]
        else:
            wrong += ["weights that are away were read"] if place.reshard else []
    return wrong


def lean(place: Place) -> list[str]:
    """Look at the peak of memory while the device is far behind its host."""
    if place.device.type != "cuda":
        return []
    num_layers, width = 16, 1024
    size_bytes, peaks = 4 * width * width, []
    for reshard in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
        model = nn.Sequential(*layers).to(place.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, width, device=place.device)
        with attached_to(place, model, optimizer, buckets=size_bytes, reshard=reshard):
            # What is there but for the model: lanes, and what they pass through.
            before = torch.cuda.memory_allocated() - num_layers * size_bytes
            for number in range(5):
                if number == 2:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    torch.cuda._sleep(20 * NAP_CYCLES)
                model(x).square().mean().backward()
                optimizer.step()
            peaks.append((torch.cuda.max_memory_allocated() - before) / size_bytes)
        torch.cuda.synchronize()
        del model, optimizer, layers
        gc.collect()
    # Slices and their sums; weights and gradients of a few layers; what backward makes.
    most = 2 * num_layers / place.size + 2 * (AHEAD + 2) + 4
    most = most if place.size == 1 else peaks[0]
    is_lean = peaks[1] <= most
    return [] if is_lean else [f"{peaks[1]:.1f} layers, {peaks[0]:.1f} without, at most {most}"]


# -- refusals ----------------------------------------------------------------------------------


def refused(place: Place) -> list[str]:
    model = place.model()
    if place.size == 1 or place.over == "gloo":
        return []
    optimizer = OPTIMIZERS["adam"](model.parameters())
    try:
        with Groups(mesh(dp=place.size), backend="gloo") as groups:
            attach(model, optimizer, groups)
    except OptionError as error:
        return [] if "over gloo" in str(error) else [str(error)]
    return ["a model on a GPU was attached over gloo"]


WORKS = {
    "values": (optimizers, norms, halves),
    "ways": (accumulated, saved, odd, refused),
    "order": (in_disorder, no_host_waits),
    "sliced values": (optimizers, norms, halves, to_the_bit),
    "sliced ways": (accumulated, saved, odd, uneven),
    "sliced order": (in_disorder, no_host_waits, lean),
}
"""By start of ranks."""
PLACES = ((1, "nccl"), (1, "peer"), (2, "peer"), (3, "peer"))


def work(rank: int, size: int, over: str, name: str) -> list[str]:
    """Do what belongs together, on one start of ranks."""
    place = Place(rank, size, over, reshard=name.startswith("sliced"))
    return [f"{each.__name__}: {wrong}" for each in WORKS[name] for wrong in each(place)]


def _main() -> None:
    for size, over in PLACES:
        for name in sys.argv[1:] or WORKS:
            try:
                found = run_ranks(work, size, over, name)
            except RankError as error:
                found = [str(error)]
            is_right = found == [[]] * size
            sys.stdout.write(f"{name} over {over}, {size} ranks: {is_right or found}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _main()
