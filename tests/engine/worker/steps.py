"""Plays the scheduler to a ModelRunner: rows, blocks and plans by hand, so that a test says what a step holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from pagedray.engine.checkpoint import Checkpoint
from pagedray.engine.messages import NewSeq, RunnerOutput, SamplingParams, ScheduledSeq, SchedulerOutput
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.registry import Model, build_model
from pagedray.engine.models.spec import ModelSpec
from pagedray.engine.models.stages import stage_spec
from pagedray.engine.worker.attention.cpu_backend import CpuAttention
from pagedray.engine.worker.attention.flashinfer_backend import FlashInferAttention
from pagedray.engine.worker.attention.torch_backend import TorchAttention
from pagedray.engine.worker.attention.triton_backend import TritonAttention
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.parallel import ALONE, Parallel
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.runner import ModelRunner
from pagedray.engine.worker.stage import OnlyStage, PipelineStage

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 800, 4
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "num_key_value_heads": 4},
    ),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "num_key_value_heads": 1,
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 2,
            },
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 12}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "rope_parameters": GEMMA_ROPE,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": True,
        },
    ),
}
FAMILIES["gemma3"][1]["layer_types"] = FAMILIES["gemma3"][1]["layer_types"][:5]


def reference_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with seeded weights: large enough that every part of a block matters, biases included."""
    import transformers

    name, options = FAMILIES[family]
    config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**{**SIZES, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.parameters():
            scale = 0.3 if tensor.dim() == 1 else 1.5 / tensor.shape[-1] ** 0.5
            centre = tensor.mean() if tensor.dim() == 1 else 0.0  # norms stay around 1, Gemma's around 0
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + centre)
    return model.to(dtype)


def spec_of(reference: Any) -> ModelSpec:
    config = {**reference.config.to_dict(), "architectures": [type(reference).__name__]}
    return model_spec(Checkpoint("tiny", Path("tiny"), "safetensors", config, {}))


def our_model(
    reference: Any, dtype: torch.dtype = torch.float32, device: torch.device = CPU, parallel: Parallel = ALONE
) -> Model:
    """This stage's part of it."""
    spec = stage_spec(spec_of(reference), parallel.pp.rank, parallel.pp.size)
    model = build_model(spec, dtype, device, parallel)
    stored = reference.state_dict()
    with torch.no_grad():
        for name, slot in model.weight_slots().items():
            slot.tensor.copy_(stored[name][slot.index])
    model.finish_loading()
    return model


def make_runner(
    reference: Any,
    dtype: torch.dtype = torch.float32,
    num_rows: int = 12,
    *,
    backend: str = "torch",
    device: torch.device = CPU,
    kv_dtype: torch.dtype | None = None,
    parallel: Parallel = ALONE,
) -> ModelRunner:
    spec = stage_spec(spec_of(reference), parallel.pp.rank, parallel.pp.size)
    cache = KVCache(spec, NUM_BLOCKS, BLOCK_SIZE, kv_dtype or dtype, device)
    rows = RowState(num_rows, len(cache.windows), -(-spec.max_context // BLOCK_SIZE), device)
    attention: CpuAttention | TorchAttention | TritonAttention | FlashInferAttention
    if backend == "torch":
        attention = TorchAttention(cache, rows)
    elif backend == "cpu":
        attention = CpuAttention(cache, rows, spec.num_heads)
    elif backend == "triton":
        attention = TritonAttention(cache, rows, spec.num_heads, dtype, 1.0, num_sms=8)
    else:
        attention = FlashInferAttention(cache, rows, spec, dtype, 1.0)
    stage = PipelineStage(parallel, rows.last_token, spec.hidden, dtype) if parallel.pp.size > 1 else OnlyStage()
    model = our_model(reference, dtype, device, parallel)
    return ModelRunner(model, cache, rows, attention, spec.vocab_size, stage)


@torch.no_grad()
def reference_logprobs(reference: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), V]: row p is about the token at p + 1."""
    logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclasses.dataclass
class Seq:
    row: int
    ids: list[int]  # known to the test; sampled ones are added when their step is done
    num_prompt: int
    num_computed: int
    blocks: list[list[int]]  # per group
    num_sent: int = 0  # blocks that the worker was told of


class Steps:
    """`begin` sequences, `run` steps, `end` sequences. Rows of the ended ones are reused at once."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.seqs: dict[str, Seq] = {}
        self._free_rows = list(range(len(runner.rows.num_known_cpu)))[::-1]
        self._next_block = 1
        self._added: list[NewSeq] = []
        self._freed: list[int] = []
        self._step = 0

    def begin(
        self,
        name: str,
        ids: list[int],
        *,
        num_prompt: int | None = None,
        shares: str = "",
        num_shared: int = 0,
        **params: Any,
    ) -> None:
        """A sequence with known tokens; the K/V of its first num_shared ones lie in blocks of sequence `shares`."""
        groups = len(self.runner.cache.windows)
        blocks: list[list[int]] = [[] for _ in range(groups)]
        if num_shared:
            assert num_shared % BLOCK_SIZE == 0
            blocks = [table[: num_shared // BLOCK_SIZE] for table in self.seqs[shares].blocks]
        seq = Seq(self._free_rows.pop(), list(ids), num_prompt or len(ids), num_shared, blocks)
        self.seqs[name] = seq
        settings = {"max_tokens": 100, "seed": 0, "temperature": 0.0, **params}
        self._added.append(NewSeq(name, seq.row, tuple(ids), seq.num_prompt, SamplingParams(**settings), ()))

    def end(self, name: str) -> None:
        row = self.seqs.pop(name).row
        self._freed.append(row)
        self._free_rows.append(row)

    def run(self, num_tokens: dict[str, int]) -> RunnerOutput:
        """One step; token ids that it samples are appended to their sequences."""
        scheduled = []
        for name, count in num_tokens.items():
            seq = self.seqs[name]
            end = seq.num_computed + count
            assert end <= len(seq.ids)
            self._extend(seq, end)
            new = tuple(tuple(blocks[seq.num_sent :]) for blocks in seq.blocks)
            seq.num_sent = len(seq.blocks[0])
            scheduled.append(ScheduledSeq(name, seq.row, seq.num_computed, count, end == len(seq.ids), new))
            seq.num_computed = end
        out = SchedulerOutput(self._step, tuple(self._added), tuple(scheduled), tuple(self._freed))
        self._added, self._freed, self._step = [], [], self._step + 1
        result = self.runner.run(out).wait()
        assert result.step == out.step
        assert len(result.token_ids) == len(scheduled)
        for name, token_id, planned in zip(num_tokens, result.token_ids, scheduled, strict=True):
            assert (token_id >= 0) == planned.samples
            if planned.samples:
                self.seqs[name].ids.append(token_id)
        return result

    def prefill(self, name: str, chunk: int) -> RunnerOutput:
        seq = self.seqs[name]
        while (left := len(seq.ids) - seq.num_computed) > chunk:
            self.run({name: chunk})
        return self.run({name: left})

    def _extend(self, seq: Seq, end: int) -> None:
        for blocks in seq.blocks:
            while len(blocks) * BLOCK_SIZE < end:
                blocks.append(self._next_block)
                self._next_block += 1
