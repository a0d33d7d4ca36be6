"""Captured modules: values are torch's, samples are tried, and a program of them trains a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.step.captured.models import CLASSES, TOKENS, WIDTH, Block, Head, Residual, training
from tests.step.ranks import run_ranks
from torch import nn

import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.program.interpret import gathered, scattered

BATCH, STEPS = 8, 3


def _batches() -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator)
        yield {"x": x, "label": torch.randint(CLASSES, (BATCH,), generator=generator)}


def _by_torch(block: nn.Module, head: nn.Module) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and weights of torch's own training, on whole batches."""
    optimizer = torch.optim.Adam([*block.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for batch in _batches():
        optimizer.zero_grad()
        loss = head(block(batch["x"]), batch["label"]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [_flat(block), _flat(head)]


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def _schedules(plain: ps.Program) -> dict[str, ps.Program]:
    sharded = plain.split("g1").split("g2").sink("g1.gather").sink("g2.gather")
    sliced = sharded.keep_sliced("m1", "v1", "m2", "v2")
    ahead = sliced.rotate("w1.gather").rotate("w2.gather").rotate("x").rotate("label")
    return {
        "plain": plain,
        "one bucket": plain.bucket("g1", "g2"),
        "ahead": ahead.overlap("g2.scatter", "block.backward.weights"),
    }


def trains(rank: int, size: int) -> dict[str, tuple[float, float]]:
    """Train by program on this rank, and return by schedule how far it is from torch."""
    torch.manual_seed(1)
    block, head = Block(), Head()
    x, label = next(_batches()).values()
    blocks, heads = ps.capture(block, x, flat=True), ps.capture(head, x, label, flat=True)
    start = [*blocks.values(), *heads.values()]
    losses, weights = _by_torch(block, head)
    sizes = {"n": blocks.num_weights, "k": heads.num_weights, "batch": BATCH}
    plain = training(blocks, heads).on(ps.mesh(dp=size), **sizes)
    found = {
        name: _distance(program, {**blocks.calls, **heads.calls}, rank, start, losses, weights)
        for name, program in _schedules(plain).items()
    }
    found["chunks"] = (_in_chunks(blocks, block, rank, size), 0.0)
    return found | {"numbers": (0.0, _numbers(rank, size))}


class Loss(nn.Module):
    """A sum over samples, by a number that the program knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * k).square().sum()


def _scaled(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x * k


def _numbers(rank: int, size: int) -> float:
    """Give functions numbers of the host, also in chunks; return how far that is from torch."""
    module, x = Loss(), torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))
    given = (x, torch.tensor(2.0))
    loss = ps.capture(module, *given, batch_dim=(0, None), flat=True)
    rows = ps.capture(_scaled, *given, batch_dim=(0, None), name="rows")

    @ps.program
    def step(x: ps.S(0)[8, WIDTH], w: ps.R["n"], k):
        (g,) = ps.grad(0.5 * loss(x, ps.cast(k, ps.f32), w), (w,))
        y = rows(x, ps.cast(k, ps.f32))
        (z,) = ps.call("add", x, 2.0, outs=[ps.Type(shape=(8, WIDTH))], batch=((0, None), (0,)))
        return ps.all_reduce(g), y, z

    calls = {**loss.calls, **rows.calls, "add": torch.add}
    made = step.on(ps.mesh(dp=size), n=loss.num_weights)
    mine = x[4 * rank : 4 * rank + 4]
    with (
        ps.Groups(made.mesh) as groups,
        ps.compile(made.chunk(2, "y"), groups, calls=calls) as run,
    ):
        found = run(x=mine, w=loss.values()[0], k=3.0)
    (0.5 * module(x, torch.tensor(3.0))).backward()
    slopes = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    pairs = zip(found, (slopes, 3 * mine, mine + 2), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def _in_chunks(blocks: ps.Captured, block: nn.Module, rank: int, size: int) -> float:
    """Gather samples and call the block, chunk by chunk; return how far that is from the module."""

    @ps.program
    def forward(x: ps.S(0)["batch", TOKENS, WIDTH], w: ps.R["n"]):
        whole = ps.all_gather(x)
        return blocks(whole, w)

    made = forward.on(ps.mesh(dp=size), batch=7, n=blocks.num_weights)
    cut = made.chunk(2, "whole", made.outputs[0]).overlap()
    x = torch.randn(7, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    mine = x[4 * rank : 4 * rank + 4]
    other = ps.capture(torch.tanh, x, name="block")
    with ps.Groups(made.mesh) as groups:
        with pytest.raises(ProgramError, match="not the one that the program was written with"):
            ps.compile(cut, groups, calls=other.calls)
        with ps.compile(cut, groups, calls=blocks.calls) as step:
            (found,) = step(x=mine, w=_flat(block))
    with torch.no_grad():
        return float((found - block(x)).abs().max())


def _distance(
    program: ps.Program,
    calls: dict[str, Any],
    rank: int,
    start: list[torch.Tensor],
    losses: list[float],
    weights: list[torch.Tensor],
) -> tuple[float, float]:
    mesh, mine, expected = program.mesh, {}, {}
    for number, value in enumerate(start, 1):
        for name in (f"w{number}", f"m{number}", f"v{number}"):
            whole = value if name[0] == "w" else torch.zeros_like(value)
            held = scattered(whole.numpy(), program[name].type, mesh)[rank]
            mine[name] = torch.tensor(held, dtype=torch.float32)
        kept = scattered(weights[number - 1].numpy(), program[f"w{number}"].type, mesh)[rank]
        expected[f"w{number}"] = torch.tensor(kept, dtype=torch.float32)
    share = BATCH // mesh.num_ranks
    batches = (
        {name: one[rank * share : (rank + 1) * share] for name, one in batch.items()}
        for batch in _batches()
    )
    off = 0.0
    with (
        ps.Groups(mesh) as groups,
        ps.compile(program, groups, calls=calls, sources={"data": batches}) as step,
    ):
        for t, loss in enumerate(losses, 1):
            off = max(off, abs(float(step(**mine, t=t, lr=1e-2)[0]) - loss))
        step.forget()
    return off, max(float((mine[name] - expected[name]).abs().max()) for name in expected)


def test_a_program_of_captured_modules_trains_as_torch_does_under_every_schedule() -> None:
    for found in run_ranks(trains, 2):
        assert set(found) == {"plain", "one bucket", "ahead", "chunks", "numbers"}
        for name, (losses, weights) in found.items():
            assert losses < 1e-5, name
            assert weights < 1e-4, name


def _interpreted(program: ps.Program, given: dict[str, Any], captured: ps.Captured) -> list[Any]:
    out = ps.interpret(program, given, calls=captured.calls)
    types = [program[name].type for name in program.outputs]
    pairs = zip(out.outputs, types, strict=True)
    return [gathered(held, made, program.mesh) for held, made in pairs]


def test_gradients_of_a_convolutional_network_are_those_of_autograd() -> None:
    batch = 5
    torch.manual_seed(0)
    module = Residual().eval().double()
    module.norm.running_mean.normal_()
    net = ps.capture(module, torch.randn(3, 3, 8, 8, dtype=torch.float64), flat=True)
    assert net.kept, "what can be cut by samples is kept, though not everything can"
    assert [slot.name for slot in net.operands][:3] == ["x", "weights", "norm.running_mean"]

    @ps.program
    def both(x: ps.S(0)["b", 3, 8, 8, ps.f64], w: ps.R["n", ps.f64], mu: ps.R[8, ps.f64],
             var: ps.R[8, ps.f64], num: ps.R[ps.i64], c: ps.R[CLASSES, ps.f64]):  # fmt: skip
        y = net(x, w, mu, var, num)
        dx, dw = ps.grad(ps.sum(y * c), (x, w))
        return y, dx, ps.all_reduce(dw)

    program = both.on(ps.mesh(dp=2), b=batch, n=net.num_weights)
    assert str(program[program.outputs[1]].type).endswith("dp:S(0)")
    x = torch.randn(batch, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    c = torch.randn(CLASSES, dtype=torch.float64)
    y = module(x)
    (y * c).sum().backward()
    own = dict(zip(("w", "mu", "var", "num"), (v.numpy() for v in net.values()), strict=True))
    found = _interpreted(program, {"x": x.detach().numpy(), "c": c.numpy(), **own}, net)
    slopes = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    for one, expected in zip(found, (y.detach(), x.grad, slopes), strict=True):
        np.testing.assert_allclose(one, expected.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("keep", "ranks"), [(True, 2), (False, 3)])
def test_parameters_may_be_operands_one_by_one(keep: bool, ranks: int) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    net = ps.capture(module, torch.randn(2, 3), name="net", keep=keep)
    assert bool(net.kept) == keep
    assert [slot.name for slot in net.operands] == ["input", "0.weight", "0.bias", "2.weight"]

    @ps.program
    def tuned(x: ps.S(0)["b", 3], w: ps.R[4, 3], b: ps.R[4], v: ps.R[2, 4]):
        y = net(x, w, b, v)
        (dv,) = ps.grad(ps.sum(y * y), (v,))
        return ps.update(v, v - 0.1 * ps.all_reduce(dv))

    program = tuned.on(ps.mesh(dp=ranks), b=4)  # of three ranks, the last has no sample
    x = torch.randn(4, 3)
    given = dict(zip("wbv", (value.numpy() for value in net.values()), strict=True))
    found = ps.interpret(program, {"x": x.numpy(), **given}, calls=net.calls).states["v"][0]
    module(x).square().sum().backward()
    expected = module[2].weight.detach() - 0.1 * module[2].weight.grad
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)
    net.restore(*net.values()[:2], torch.from_numpy(found))
    torch.testing.assert_close(module[2].weight.detach(), expected)


def _mean(x: torch.Tensor) -> torch.Tensor:
    return (x * x).mean()


def _centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def _constant(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(3) + 0.0 * x.sum()


def _centred_tokens(tokens: torch.Tensor) -> torch.Tensor:
    return TABLE[tokens].mean(1) - TABLE[tokens].mean((0, 1))


def _first_six(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.arange(len(x)) < 6)[:, None]


def _squeezed(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze() * 2


def _if(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def _seeded(x: torch.Tensor) -> torch.Tensor:
    """Draw the same numbers each time, which a graph would not."""
    return x + torch.randn(3, generator=torch.Generator().manual_seed(1))


class Counts(nn.Module):
    """Counts how often it is called, in a buffer that it assigns to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x * 2


class CountsBeside(nn.Module):
    """The same, in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * 2


OUTSIDE = nn.Linear(3, 3)
TABLE = torch.randn(7, 3)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (_mean, "a mean over samples"),
        (_centred, "it mixes them"),
        (_constant, "does not depend on samples"),
        (_squeezed, "samples need a dimension of their own"),
        (_if, "torch cannot trace it"),
        (lambda x: x.reshape(-1), "samples need a dimension of their own"),
        (lambda x: {"y": x}, "^captured returns a dict; a tensor or a tuple of them"),
        (lambda x: (x > 100).any(), "true or false of all samples"),
        (lambda x: torch.relu(x - 100).amax(), "nobody can tell whether it is a sum"),
        (lambda x: torch.relu(x - 1.5).amax(), "result 0 (mixes|is 0)"),
        (_first_six, "result 0 of 9 samples is not that of 4"),
        (lambda x: OUTSIDE(x), "capture the module that has them"),
        (nn.Dropout(), "draws random numbers"),
        (nn.Dropout(1e-6), "draws random numbers"),
        (_seeded, "draws random numbers"),
        (nn.BatchNorm1d(3), "it changes its operand"),
        (nn.BatchNorm1d(3, track_running_stats=False), "not 1"),
        (Counts(), "it assigns to count"),
        (CountsBeside(), "neither its parameter nor its buffer"),
    ],
)
def test_what_is_not_as_it_was_said_is_refused(what: Callable[..., Any], text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        ps.capture(what, torch.randn(9, 3))


def test_whole_numbers_that_are_all_the_same_do_not_hide_what_is_mixed() -> None:
    for same in (torch.zeros(8, 3, dtype=torch.long), torch.full((1, 3), 5)):
        with pytest.raises(ProgramError, match="it mixes them"):
            ps.capture(_centred_tokens, same)
    with pytest.raises(ProgramError, match="whole numbers that are not all the same"):
        ps.capture(lambda tokens: TABLE[tokens], torch.full((4, 3), 6))


def _positive(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w)[x > 0].square().sum()


def test_what_has_as_many_elements_as_values_say_is_computed_again() -> None:
    total = ps.capture(_positive, torch.randn(4, 3), torch.randn(3), batch_dim=(0, None), name="f")
    x, w = torch.randn(6, 3), torch.randn(3, requires_grad=True)
    _, *kept = total.calls["f.keeping"](x, w.detach())
    found = total.calls["f.backward"](x, w.detach(), *kept, 1.0)
    _positive(x, w).backward()
    torch.testing.assert_close(found[1], w.grad)


def _times(constant: torch.Tensor) -> ps.Captured:
    return ps.capture(lambda x: x * constant, torch.randn(3, 4), name="times")


def test_functions_of_other_constants_are_other_functions() -> None:
    twice, thrice = _times(torch.full((4,), 2.0)), _times(torch.full((4,), 3.0))
    assert twice.digest == _times(torch.full((4,), 2.0)).digest

    @ps.program
    def both(x: ps.S(0)[4, 4]):
        return twice(x), thrice(x)

    with pytest.raises(ProgramError, match="two functions called 'times'"):
        both.on(ps.mesh(dp=2))

    @ps.program
    def one(x: ps.S(0)[4, 4]):
        return twice(x)

    with pytest.raises(ProgramError, match="not the one that the program was written with"):
        ps.interpret(one.on(ps.mesh(dp=2)), {"x": np.ones((4, 4))}, calls=thrice.calls)


class Scaled(nn.Sequential):
    scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_a_module_stays_as_it_was_captured() -> None:
    module = Scaled(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    scaled = ps.capture(module, torch.randn(3, 4), flat=True)
    x, expected = torch.randn(6, 4), module(torch.ones(5, 4))
    module.train()
    (found,) = scaled.calls["scaled"](torch.ones(5, 4), *scaled.values())
    torch.testing.assert_close(found, expected.detach())
    assert module[1].training, "it is the user's to train otherwise"
    module.scale = 3.0
    with pytest.raises(ProgramError, match="something else than when it was captured"):
        scaled.calls["scaled"](x, *scaled.values())
    with pytest.raises(ProgramError, match="gather slices first"):
        scaled.restore(scaled.values()[0][:5])


class Picked(nn.Module):
    """Rows that are looked up in a table of all rows, far from its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layer(x))
        table = torch.cat([h.new_zeros(4096), h.reshape(-1)])
        return table[at + torch.arange(len(x))[:, None] * 6 + 4096]


class Alone(Picked):
    """One sample alone is computed otherwise."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid().logit() if len(x) == 1 else x
        return super().forward(x, at).sigmoid()


class Turned(nn.Module):
    """Its result is not contiguous, nor is what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        tokens = torch.stack([x, x * x, at.to(x)], 1)
        mixed: torch.Tensor = self.mixed(tokens, tokens, tokens, need_weights=False)[0]
        return mixed


@pytest.mark.parametrize("kind", [Picked, Alone, Turned])
def test_a_backward_reads_what_a_forward_kept_in_chunks(kind: Any) -> None:
    torch.manual_seed(3)
    module, x = kind(), torch.randn(8, 6)
    at = torch.randint(6, (8, 6))
    net = ps.capture(module, x, at, name="net", flat=True)
    assert net.kept

    @ps.program
    def slopes(x: ps.S(0)[8, 6], at: ps.S(0)[8, 6, ps.i64], w: ps.R["n"]):
        y = net(x, at, w)
        (g,) = ps.grad(ps.sum(y * y), (w,))
        return y, ps.all_reduce(g)

    module.double()(x.double(), at).square().sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    made = slopes.on(ps.mesh(dp=2), n=net.num_weights)
    given = {"x": x.double().numpy(), "at": at.numpy(), "w": net.values()[0].double().numpy()}
    for one in (made, made.chunk(2, "y"), made.chunk(4, "y")):
        found = _interpreted(one, given, net)[1]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-7)


def test_samples_that_depend_on_each_other_are_captured_whole() -> None:
    centred = ps.capture(_centred, torch.randn(4, 3), batch_dim=None)

    @ps.program
    def called(x: ps.R[4, 3]):
        y = centred(x)
        return (y, *ps.grad(ps.sum(y * y), (x,)))

    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found = _interpreted(called.on(ps.mesh(dp=2)), {"x": x.detach().numpy()}, centred)
    _centred(x).square().sum().backward()
    np.testing.assert_allclose(found[1], x.grad.numpy(), atol=1e-12)

    @ps.program
    def sliced(x: ps.S(0)[4, 3]):
        return centred(x)

    with pytest.raises(ProgramError, match="all_gather it on axis 'dp'"):
        sliced.on(ps.mesh(dp=2))


class Narrow(nn.Module):
    """Computes in bfloat16, which arrays have not, where it has values in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tanh(self.second(torch.tanh(self.first(x))))


def test_a_module_that_makes_bfloat16_is_interpreted() -> None:
    torch.manual_seed(0)
    module, x = Narrow(), torch.randn(6, 3)
    net = ps.capture(module, x, name="net", flat=True)
    assert net.kept

    @ps.program
    def slopes(x: ps.S(0)[6, 3], w: ps.R["n"]):
        y = ps.cast(net(x, w), ps.f32)
        (g,) = ps.grad(ps.sum(y * y), (w,))
        return y, ps.all_reduce(g)

    y = module(x).float()
    y.square().sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    made = slopes.on(ps.mesh(dp=2), n=net.num_weights)
    found = _interpreted(made, {"x": x.numpy(), "w": net.values()[0].numpy()}, net)
    np.testing.assert_allclose(found[0], y.detach().numpy(), atol=0.02)
    np.testing.assert_allclose(found[1], expected.numpy(), atol=0.05)


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = x[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None])


def test_a_mask_is_an_operand_of_true_and_false() -> None:
    x, mask = torch.randn(4, 5, 6), torch.arange(5) < torch.tensor([[5], [2], [3], [1]])
    net = ps.capture(Masked(), x, mask, name="net")

    @ps.program
    def masked(x: ps.S(0)[4, 5, 6], mask: ps.S(0)[4, 5, ps.bool_]):
        return net(x, mask)

    given = {"x": x.numpy(), "mask": mask.numpy()}
    (found,) = _interpreted(masked.on(ps.mesh(dp=2)), given, net)
    np.testing.assert_allclose(found, Masked()(x, mask).numpy(), atol=1e-5)


def test_a_gradient_that_hooks_would_change_is_refused() -> None:
    module = nn.Linear(3, 2)
    module.weight.register_hook(lambda g: g * 0)
    net = ps.capture(module, torch.randn(4, 3), name="net", flat=True)

    @ps.program
    def forward(x: ps.S(0)[4, 3], w: ps.R["n"]):
        return net(x, w)

    @ps.program
    def slopes(x: ps.S(0)[4, 3], w: ps.R["n"]):
        (g,) = ps.grad(ps.sum(net(x, w)), (w,))
        return ps.all_reduce(g)

    x = torch.randn(4, 3)
    given = {"x": x.numpy(), "w": net.values()[0].numpy()}
    (found,) = _interpreted(forward.on(ps.mesh(dp=2), n=net.num_weights), given, net)
    np.testing.assert_allclose(found, module(x).detach().numpy(), atol=1e-6)
    with pytest.raises(ProgramError, match="weight has hooks on its gradient"):
        slopes.on(ps.mesh(dp=2), n=net.num_weights)
