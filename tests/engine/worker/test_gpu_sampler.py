"""The GPU's sampler, in Triton's interpreter and, where there is one, on a GPU: beside the CPU's and the reference."""

import os
import random
from collections.abc import Iterator
from math import inf, nan

import numpy as np
import pytest
import torch

from pagedray.engine.worker import gpu_sampler
from pagedray.engine.worker.gpu_sampler import GpuSampler, GpuSamplingState
from pagedray.engine.worker.sampler import SampledTokens
from pagedray.kernels.logprobs import token_logprobs_triton
from pagedray.kernels.sample_rows import sample_rows_triton
from tests.engine.worker.sampling_reference import (
    STOP_IDS,
    VOCAB,
    ReferenceSequence,
    Rows,
    hash_seed,
    params,
    step_logits,
)
from tests.engine.worker.test_sampler import TABLE, prompt
from tests.engine.worker.test_sampler_logprobs import assert_logprobs, expected_logprobs

# A GPU says nothing of an infinity in a lane that is masked later, which numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here; the same test marked gpu runs on the GPU")
    monkeypatch.setattr(gpu_sampler, "sample_rows", sample_rows_triton)
    monkeypatch.setattr(gpu_sampler, "token_logprobs", token_logprobs_triton)
    yield torch.device("cpu")


class GpuRows(Rows):
    def __init__(self, device: torch.device, num_rows: int, vocab: int = VOCAB):
        self.device = device
        super().__init__(num_rows, vocab)

    def _make(self, num_rows: int, vocab: int) -> tuple[GpuSamplingState, GpuSampler]:
        state = GpuSamplingState(num_rows, vocab, self.device)
        return state, GpuSampler(state)


def messages(found: SampledTokens) -> tuple:
    return found.to_host(lambda tensor: tensor.to("cpu", non_blocking=False)).to_messages()


def sample_one(device: torch.device, logits: list[float], seq: ReferenceSequence) -> int:
    rows = GpuRows(device, 1, len(logits))
    rows.add(0, seq)
    return messages(rows.sample(torch.tensor([logits]), [0]))[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_mixed_rows_equal_the_cpus(device, dtype, monkeypatch):
    """Random batches of all settings; sequences are preempted and come back on other rows."""
    monkeypatch.setattr(gpu_sampler, "max_rows", lambda vocab, device: 7)  # edited rows come in several parts
    rng = random.Random(5)
    rows, cpu = GpuRows(device, 24), Rows(24)
    waiting = [
        (name, ReferenceSequence(params(seed=hash_seed(name, 0), **settings), prompt(rng), STOP_IDS))
        for name, settings in TABLE.items()
    ]
    rng.shuffle(waiting)
    names: dict[int, str] = {}
    for _ in range(5 if device.type == "cpu" else 60):
        for row in rng.sample(sorted(rows.held), min(9, len(rows.held))):
            cpu.free(row)
            waiting.append((names[row], rows.free(row)))
        free = [row for row in range(24) if row not in rows.held]
        rng.shuffle(free)
        while free and waiting:
            row = free.pop()
            names[row], seq = waiting.pop(0)
            rows.add(row, seq)
            cpu.add(row, seq)
        batch = rng.sample(sorted(rows.held), rng.randint(8, 24))
        logits = torch.stack([step_logits(names[row], rows.held[row].position, dtype=dtype) for row in batch])
        before = logits.clone()
        tokens, scored = messages(rows.sample(logits, batch))
        assert torch.equal(logits, before) and scored == {}
        assert tokens == cpu.sample(logits, batch).token_ids.tolist()
        for row, z, token_id in zip(batch, logits.float().numpy(), tokens, strict=True):
            rows.held[row].check_and_append(z, token_id)


def test_a_token_depends_on_its_own_row_alone(device):
    vocab = 3000
    names = [name for name in TABLE if "beyond" not in name][:: 3 if device.type == "cpu" else 1]
    alone = []
    for name in names:
        rows = GpuRows(device, 1, vocab)
        rows.add(0, ReferenceSequence(params(seed=hash_seed(name, 0), **TABLE[name]), [3, 4], STOP_IDS))
        alone += messages(rows.sample(step_logits(name, 2, vocab).unsqueeze(0), [0]))[0]
    rows = GpuRows(device, len(names), vocab)
    order = random.Random(1).sample(range(len(names)), len(names))
    for row, at in enumerate(order):
        seed = hash_seed(names[at], 0)
        rows.add(row, ReferenceSequence(params(seed=seed, **TABLE[names[at]]), [3, 4], STOP_IDS))
    logits = torch.stack([step_logits(names[at], 2, vocab) for at in order])
    assert messages(rows.sample(logits, list(range(len(order)))))[0] == [alone[at] for at in order]


@pytest.mark.parametrize("num_asked", [1, 3, 6])
def test_logprobs_of_the_rows_that_asked(device, num_asked):
    asked = [20, 0, 3, 5, 1, 2][:num_asked] + [None] * (6 - num_asked)
    random.Random(2).shuffle(asked)
    rows = GpuRows(device, 6)
    for row, k in enumerate(asked):
        changes = {"repetition_penalty": 2.0} if row % 2 else {}
        rows.add(row, ReferenceSequence(params(seed=row, logprobs=k, **changes), [5, 6], STOP_IDS))
    logits = torch.stack([step_logits(str(row), 0, dtype=torch.bfloat16) for row in range(6)])
    tokens, scored = messages(rows.sample(logits, list(range(6))))
    for row, k in enumerate(asked):
        if k is None:
            assert row not in scored
        else:
            assert_logprobs(scored[row], expected_logprobs(logits[row].float().numpy(), tokens[row], k))


def test_a_filter_too_small_for_float32_is_none(device):
    """The host must agree with the kernel about which rows have filters, or nobody would write the token."""
    logits = torch.tensor([[0.0, -40.0, 1.0]])
    rows = GpuRows(device, 1, 3)
    rows.add(0, ReferenceSequence(params(min_p=1e-60, seed=3), [0]))
    assert not rows.state.is_filtered_cpu[0]
    cpu = Rows(1, 3)
    cpu.add(0, ReferenceSequence(params(min_p=1e-60, seed=3), [0]))
    assert messages(rows.sample(logits, [0]))[0] == cpu.sample(logits, [0]).token_ids.tolist()


def test_what_broken_rows_give(device):
    greedy = params(temperature=0.0)
    assert sample_one(device, [nan] * 5, ReferenceSequence(greedy, [0])) == 0
    assert sample_one(device, [nan, 1.0, 2.0], ReferenceSequence(greedy, [0])) == 2
    assert sample_one(device, [0.0, inf, inf], ReferenceSequence(greedy, [0])) == 1
    only = params(temperature=0.0, allowed_token_ids=(3, 4), repetition_penalty=5.0)
    assert sample_one(device, [nan] * 5, ReferenceSequence(only, [0])) == 3
    for settings in ({}, {"top_p": 0.9}, {"top_k": 2}):
        never = params(allowed_token_ids=(1, 2), **settings)
        assert sample_one(device, [1.0, -inf, -inf], ReferenceSequence(never, [0])) in (1, 2)
    found = {sample_one(device, [nan] * 3, ReferenceSequence(params(seed=seed), [0])) for seed in range(30)}
    assert found == {0, 1, 2}
    assert sample_one(device, [1.0, 9.0, 2.0], ReferenceSequence(params(repetition_penalty=1e-60), [1])) == 1
    broken = ReferenceSequence(params(logprobs=3, temperature=0.0), [0])
    rows = GpuRows(device, 2, 4)
    rows.add(0, broken)
    rows.add(1, broken)
    _, scored = messages(rows.sample(torch.tensor([[nan] * 4, [0.0, nan, inf, 1.0]]), [0, 1]))
    assert scored[0].logprob == pytest.approx(-np.log(4)) and scored[0].top_ids == (0, 1, 2)
    assert (scored[1].token_id, scored[1].logprob, scored[1].rank) == (2, 0.0, 1)
    assert scored[1].top_ids == (2, 3, 0) and scored[1].top_logprobs[1:] == (-9999.0, -9999.0)


def test_penalties_apply_to_tokens_the_host_has_not_seen(device):
    rows = GpuRows(device, 2, 4)
    for row in range(2):
        rows.add(row, ReferenceSequence(params(temperature=0.0, presence_penalty=1.5), [3]))
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [5.0, 3.0, 2.0, 4.0]], device=device)
    steps = [rows.sampler.sample(logits, rows.state.gather([0, 1], [n, n])).token_ids for n in (1, 2, 3)]
    assert [step.tolist() for step in steps] == [[1, 0], [2, 3], [1, 0]]


def test_edited_rows_are_told_from_others_at_every_position():
    state = GpuSamplingState(len(TABLE), VOCAB, torch.device("cpu"))
    for row, settings in enumerate(TABLE.values()):
        seq = ReferenceSequence(params(**settings), [1, 2, 3], STOP_IDS)
        state.add(seq.new_seq(row))
        for position in range(3, 15):
            assert (position < state.edited_until_cpu[row]) == state._row(row).is_edited(position), settings


def test_no_rows_and_rows_without_a_sequence(device):
    rows = GpuRows(device, 2)
    assert messages(rows.sample(torch.zeros((0, VOCAB)), [])) == ([], {})
    rows.add(0, ReferenceSequence(params(), [1]))
    for index in ([1], [0, 1]):
        with pytest.raises(AssertionError, match="row 1"):
            rows.state.gather(index, [0] * len(index))
    with pytest.raises(AssertionError, match="151"):
        rows.sample(torch.zeros((1, VOCAB + 1)), [0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_host_never_waits():
    device = torch.device("cuda")

    def steps(is_checked: bool) -> None:
        rows = GpuRows(device, len(TABLE), 5000)
        logits = torch.randn((len(TABLE), 5000), device=device).bfloat16()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if is_checked else "default")
        try:
            for row, settings in enumerate(TABLE.values()):
                p = params(logprobs=row % 3 or None, **settings)
                rows.add(row, ReferenceSequence(p, list(range(300)), STOP_IDS))
            for _ in range(2):
                rows.sample(logits, list(range(len(TABLE))))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    steps(False)
    steps(True)
