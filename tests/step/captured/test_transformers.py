"""Models of transformers as calls: their logits and gradients over slices are torch's."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock.step as ps
from penstock.errors import ProgramError
from penstock.step.program.interpret import gathered
from penstock.step.program.layouts import DTYPES

SAMPLES, TOKENS, WORDS = 6, 5, 32


class Logits(nn.Module):
    """What is captured: arguments by name, and one tensor of what comes back."""

    def __init__(self, model: nn.Module, *names: str, **more: Any) -> None:
        super().__init__()
        self.model, self.names, self.more = model, names, more

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        found = self.model(**dict(zip(self.names, given, strict=True)), **self.more)
        logits: torch.Tensor = found.logits
        return logits


def gpt2(transformers: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return Logits(transformers.GPT2LMHeadModel(config), "input_ids", use_cache=False)


def bert(transformers: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=8,
    )  # fmt: skip
    return Logits(transformers.BertForMaskedLM(config), "input_ids", "attention_mask")


def t5(transformers: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    return Logits(model, "input_ids", "decoder_input_ids", use_cache=False)


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="pip install transformers")


def _examples(module: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    words = [torch.randint(1, WORDS, (SAMPLES, TOKENS), generator=generator) for _ in module.names]
    if "attention_mask" in module.names:  # what is padded differs from sample to sample
        words[1] = (torch.arange(TOKENS) < torch.arange(SAMPLES)[:, None] + 1).long()
    return words


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_logits_and_gradients_over_slices_are_those_of_torch(
    transformers: Any, make: Callable[[Any], Any]
) -> None:
    torch.manual_seed(1)
    module = make(transformers).eval()
    examples = _examples(module)
    block = ps.capture(module, *examples, name="model", flat=True)

    def slope(**given: Any) -> Any:
        logits = block(*given.values())
        (of_weights,) = ps.grad(ps.sum(logits * logits), (given["weights"],))
        return logits, ps.all_reduce(of_weights)

    # The examples, the weights as one vector, and buffers such as tables of positions.
    tensors = [*examples, *block.values()]
    names = [slot.name.replace(".", "_") for slot in block.operands]
    layouts = {
        name: (ps.R if slot.dim is None else ps.S(0))[(*slot.shape, DTYPES[slot.dtype])]
        for name, slot in zip(names, block.operands, strict=True)
    }
    slope.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])
    made = ps.program(**layouts)(slope).on(ps.mesh(dp=2))
    given = dict(zip(names, (one.numpy() for one in tensors), strict=True))
    out = ps.interpret(made, given, calls=block.calls)
    logits, of_weights = (
        gathered(held, made[name].type, made.mesh)
        for name, held in zip(made.outputs, out.outputs, strict=True)
    )
    expected = module(*examples)
    expected.square().sum().backward()
    trained = [p.grad.reshape(-1) for p in module.parameters()]
    assert np.allclose(logits, expected.detach().numpy(), atol=1e-5)
    scale = float(np.abs(of_weights).max())
    assert np.allclose(of_weights / scale, torch.cat(trained).numpy() / scale, atol=1e-5)


def test_a_model_that_returns_its_own_kind_of_result_is_refused_with_a_wrapper(
    transformers: Any,
) -> None:
    model = gpt2(transformers).model.eval()
    with pytest.raises(ProgramError, match=r"CausalLMOutput.*self\.model\(x, use_cache=False\)"):
        ps.capture(model, *_examples(gpt2(transformers)))


def test_a_choice_by_values_is_refused_with_its_line() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ProgramError, match=r"in test_transformers\.py:\d+: `return x if x\.sum"):
        ps.capture(Chosen(), torch.randn(6, 2))


def test_what_is_another_function_while_it_is_traced_is_refused() -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 if torch.compiler.is_compiling() else x

    with pytest.raises(ProgramError, match="result 0 of its graph is not what it computes"):
        ps.capture(other, torch.randn(6, 2))
