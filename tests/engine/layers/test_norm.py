"""Norms round where transformers' do: in bfloat16 the same numbers, not only near ones."""

import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pagedray.engine.layers.norm import HeadNorm, RMSNorm


def filled(weight: torch.Tensor, seed: int) -> None:
    weight.data.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))


def make(cls: type, seed: int) -> torch.nn.Module:
    norm = cls(32, eps=1e-5).bfloat16()
    filled(norm.weight, seed)
    return norm


def test_residual_norms() -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    residual = torch.randn(5, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    for theirs, zero_centred in [(LlamaRMSNorm, False), (Gemma3RMSNorm, True)]:
        ours, sums = RMSNorm(32, 1e-5, zero_centred).bfloat16(), residual.clone()
        filled(ours.weight, 3)
        ours.finish_loading()
        with torch.inference_mode():
            assert torch.equal(ours(x), make(theirs, 3)(x))
            assert torch.equal(ours(x, sums), make(theirs, 3)(x + residual))
        assert torch.equal(sums, x + residual)


def test_head_norms_leave_the_values() -> None:
    qkv = torch.randn(5, 8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for theirs, zero_centred in [(LlamaRMSNorm, False), (Gemma3RMSNorm, True)]:
        ours, got = HeadNorm(4, 2, 32, 1e-5, zero_centred).bfloat16(), qkv.clone()
        filled(ours.q_weight, 3)
        filled(ours.k_weight, 4)
        ours.finish_loading()
        with torch.inference_mode():
            ours(got)
            expected = make(theirs, 3)(qkv[:, :4]), make(theirs, 4)(qkv[:, 4:6]), qkv[:, 6:]
        assert torch.equal(got, torch.cat(expected, 1))
