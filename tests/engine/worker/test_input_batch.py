"""One step's tensors, by hand: blocks of 4 positions, one group."""

import torch

from pagedray.engine.messages import NewSeq, SamplingParams, ScheduledSeq, SchedulerOutput
from pagedray.engine.models.spec import ModelSpec, RopeSpec
from pagedray.engine.worker.attention.torch_backend import TorchAttention, TorchPlan
from pagedray.engine.worker.input_batch import AttentionPlan, InputBatch
from pagedray.engine.worker.kv_cache import KVCache
from pagedray.engine.worker.row_state import RowState
from pagedray.engine.worker.step_plan import StepPlan
from pagedray.kernels.paged_attention import AttentionPlan as KernelPlan

CPU = torch.device("cpu")


def tiny_spec(windows: tuple[int | None, ...] = (None,)) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=len(windows),
        hidden=8,
        intermediate=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=200,
        max_context=64,
        norm_eps=1e-5,
        tie_embeddings=True,
        activation="silu",
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        rope=RopeSpec(1e4),
        rope_local=None,
        windows=windows,
        attention_scale=0.5,
        attention_softcap=None,
        logits_softcap=None,
        embedding_scale=1.0,
        bos_id=None,
        eos_ids=(),
        dtype="float32",
    )


class Bench:
    def __init__(self, windows: tuple[int | None, ...] = (None,)):
        self.cache = KVCache(tiny_spec(windows), 30, 4, torch.float32, CPU)
        self.rows = RowState(num_rows=8, num_groups=len(self.cache.windows), max_blocks=16, device=CPU)

    def gather(self, added: tuple[NewSeq, ...], *scheduled: ScheduledSeq) -> tuple[StepPlan, InputBatch]:
        out = SchedulerOutput(0, added, scheduled, ())
        self.rows.apply(out)
        step = StepPlan.of(self.rows, out, by_length=True)
        return step, TorchAttention(self.cache, self.rows).gather(step)


def kernel(plan: AttentionPlan) -> KernelPlan:
    assert isinstance(plan, TorchPlan)
    return plan.kernel


def new(row: int, ids: range, num_prompt: int | None = None, prompt_logprobs: int | None = None) -> NewSeq:
    params = SamplingParams(max_tokens=5, seed=0, prompt_logprobs=prompt_logprobs)
    return NewSeq(f"seq{row}", row, tuple(ids), num_prompt or len(ids), params, ())


def part(row: int, start: int, num_tokens: int, samples: bool, *blocks: int) -> ScheduledSeq:
    return ScheduledSeq(f"seq{row}", row, start, num_tokens, samples, (blocks,))


def test_single_tokens_come_first_by_length_and_results_follow_the_plan() -> None:
    bench = Bench()
    bench.rows.last_token[:] = torch.arange(9) + 90
    step, batch = bench.gather(
        (new(0, range(100, 110)), new(1, range(10)), new(2, range(20, 25)), new(3, range(30, 33))),
        part(0, 4, 3, False, 1, 2),  # a chunk of a prompt
        part(1, 10, 1, True, 3, 4, 5),  # decodes: what it sampled last is known on the device alone
        part(2, 4, 1, True, 6, 7),  # the last token of a prompt
        part(3, 0, 3, True, 8),
    )
    assert batch.token_ids.tolist() == [24, 91, 104, 105, 106, 30, 31, 32]
    assert batch.positions.tolist() == [4, 10, 4, 5, 6, 0, 1, 2]
    assert step.sampled == (1, 2, 3)
    assert step.sampling_rows == (1, 2, 3)
    assert step.sampling_positions == (11, 5, 3)
    assert step.sampling_tokens.tolist() == [1, 0, 7]
    assert batch.wanted is not None
    assert batch.wanted.tolist() == [1, 0, 7]
    # slots of keys, then values: block * 2 * block_size + offset (one head)
    keys, values = kernel(batch.plans[0]).slots.view(-1, 2).T
    assert keys.tolist() == [8 * block + offset for block, offset in [(7, 0), (5, 2), (2, 0), (2, 1), (2, 2)]] + [
        64,
        65,
        66,
    ]
    assert (values - keys).tolist() == [4] * 8


def test_a_resumed_sequence_reads_its_known_output_and_then_the_device() -> None:
    bench = Bench()
    bench.rows.last_token[5] = 77
    _, batch = bench.gather((new(5, range(10, 16), num_prompt=4),), part(5, 5, 1, True, 1, 2))
    assert batch.token_ids.tolist() == [15]
    _, batch = bench.gather((), part(5, 6, 1, True))
    assert batch.token_ids.tolist() == [77]


def test_a_plan_per_group() -> None:
    bench = Bench(windows=(None, 3))
    step, batch = bench.gather((new(0, range(7)),), ScheduledSeq("seq0", 0, 0, 7, False, ((1, 2), (3, 4))))
    assert [kernel(plan).slots[0].item() for plan in batch.plans] == [8, 24]
    assert kernel(batch.plans[0]).chunks[0].mask is None
    assert kernel(batch.plans[1]).chunks[0].mask is not None
    assert (step.sampled, len(step.sampling_tokens)) == ((), 0)
    assert batch.wanted is not None
    assert batch.wanted.tolist() == [-7]  # the first token holds a place: no rows at all would be a case of their own


def test_whose_hidden_states_are_wanted() -> None:
    bench = Bench()
    one, two = (
        (new(0, range(6)), part(0, 0, 6, True, 1, 2)),
        (new(1, range(9), prompt_logprobs=0), part(1, 0, 9, True, 3, 4, 5)),
    )
    step, _ = bench.gather((one[0],), one[1])
    assert step.wanted_tokens is not None
    assert step.wanted_tokens.tolist() == [5]
    assert bench.gather((two[0],), two[1])[0].wanted_tokens is None  # its prompt is scored
    assert bench.gather((), part(0, 6, 1, True), part(1, 9, 1, True))[0].wanted_tokens is None  # all, in order


def test_which_logits_are_about_the_prompt() -> None:
    bench = Bench()
    step, _ = bench.gather(
        (new(0, range(10, 20), prompt_logprobs=3), new(1, range(5)), new(2, range(50, 58), 6, prompt_logprobs=0)),
        part(1, 0, 5, True, 1, 2),
        part(0, 3, 4, False, 3, 4),
        part(2, 0, 8, True, 5, 6),
    )
    first, second = step.prompt_spans
    assert (first.index, first.start, first.tokens, first.num_top) == (1, 4, slice(5, 9), 3)
    assert first.targets.tolist() == [14, 15, 16, 17]
    assert (second.index, second.start, second.tokens, second.num_top) == (2, 1, slice(9, 14), 0)
    assert second.targets.tolist() == [51, 52, 53, 54, 55]


def test_the_last_prompt_token_scores_nothing() -> None:
    bench = Bench()
    assert bench.gather((new(0, range(5), prompt_logprobs=1),), part(0, 4, 1, True, 1, 2))[0].prompt_spans == ()
    assert bench.gather((), part(0, 5, 1, True))[0].prompt_spans == ()
