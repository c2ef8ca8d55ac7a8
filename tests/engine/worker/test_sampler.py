import random
from collections import Counter

import numpy as np
import pytest
import torch

from pagedray.engine.messages import NewSeq
from pagedray.engine.worker.sampling_state import SamplingState
from pagedray.engine.worker.token_history import FIRST_SLOTS
from tests.engine.worker.sampling_reference import (
    CPU,
    STOP_IDS,
    VOCAB,
    ReferenceSequence,
    Rows,
    distribution,
    hash_seed,
    params,
    sample_one,
    step_logits,
)

# One row of the table per field, and mixtures. Ids lie in a vocabulary of 150.
TABLE = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 4.0},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "a large top_k": {"top_k": 90, "temperature": 30.0},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.8},
    "top_p of a flat distribution": {"top_p": 0.95, "temperature": 30.0},
    "top_p below float32": {"top_p": 1e-60},
    "top_p that float32 rounds to 1": {"top_p": 1 - 1e-12},
    "min_p": {"min_p": 0.1},
    "all filters": {"top_k": 20, "top_p": 0.7, "min_p": 0.02, "temperature": 1.5},
    "min_p and top_p": {"top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
    "presence": {"presence_penalty": 2.0, "temperature": 0.0},
    "frequency": {"frequency_penalty": 1.3, "temperature": 0.0},
    "frequency below 0": {"frequency_penalty": -0.7, "temperature": 0.5},
    "repetition": {"repetition_penalty": 3.0, "temperature": 0.0},
    "repetition below 1": {"repetition_penalty": 0.6},
    "all penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9},
    "bias": {"logit_bias": ((3, 6.0), (4, -100.0), (149, 5.5))},
    "a bias given twice": {"logit_bias": ((3, 4.0), (3, 4.0))},
    "allowed": {"allowed_token_ids": (5, 0, 149)},
    "one allowed": {"allowed_token_ids": (17,)},
    "bad": {"bad_token_ids": tuple(range(0, 150, 2)), "temperature": 0.0},
    "allowed and bad": {"allowed_token_ids": (5, 6, 7), "bad_token_ids": (6,)},
    "min_tokens": {"min_tokens": 6, "allowed_token_ids": (1, 2, 3, 8)},
    "min_tokens yields": {"min_tokens": 6, "allowed_token_ids": (1, 2)},
    "everything": {
        "temperature": 1.2,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.3,
        "logit_bias": ((10, 3.0), (1, 9.0)),
        "bad_token_ids": (11, 12),
        "min_tokens": 9,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_setting_at_every_step_of_random_histories(dtype):
    """Rows with all kinds of parameters share batches; sequences are preempted and come back on other rows."""
    rng = random.Random(5)
    rows = Rows(24)
    waiting = [
        (f"{name} {copy}", ReferenceSequence(params(seed=hash_seed(name, copy), **settings), prompt(rng), STOP_IDS))
        for name, settings in TABLE.items()
        for copy in range(2)
    ]
    rng.shuffle(waiting)
    names: dict[int, str] = {}
    for _ in range(120):
        for row in rng.sample(sorted(rows.held), min(3, len(rows.held))):
            waiting.append((names[row], rows.free(row)))
        free = [row for row in range(24) if row not in rows.held]
        rng.shuffle(free)
        while free and waiting:
            row = free.pop()
            names[row], seq = waiting.pop(0)
            rows.add(row, seq)
        batch = rng.sample(sorted(rows.held), rng.randint(1, 24))
        logits = torch.stack([step_logits(names[row], rows.held[row].position, dtype=dtype) for row in batch])
        before = logits.clone()
        tokens = rows.sample(logits, batch).token_ids
        assert torch.equal(logits, before)
        for row, z, token_id in zip(batch, logits.float().numpy(), tokens.tolist(), strict=True):
            rows.held[row].check_and_append(z, token_id)
    lengths = [len(seq.output) for seq in [*rows.held.values(), *(seq for _, seq in waiting)]]
    assert len(lengths) == 2 * len(TABLE) and min(lengths) > 9


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]


def test_a_token_depends_on_its_own_row_alone():
    """The same sequences alone, together, in other orders and preempted give the same tokens, bit for bit."""
    vocab = 3000  # long enough that rows are computed in blocks
    many = [
        (name, params(seed=hash_seed(name, 0), **settings), prompt(random.Random(name)))
        for name, settings in TABLE.items()
    ]
    alone: dict[str, list[int]] = {}
    for name, p, ids in many:
        rows, seq = Rows(1, vocab), ReferenceSequence(p, ids, STOP_IDS)
        rows.add(0, seq)
        for _ in range(12):
            seq.output += rows.sample(step_logits(name, seq.position, vocab).unsqueeze(0), [0]).token_ids.tolist()
        alone[name] = seq.output

    rng = random.Random(3)
    rows = Rows(40, vocab)
    sequences = {name: ReferenceSequence(p, ids, STOP_IDS) for name, p, ids in many}
    at: dict[int, str] = {}
    for _ in range(40):
        for row in rng.sample(sorted(at), len(at) // 3):
            rows.free(row)
            del at[row]
        running = [name for name in sequences if name not in at.values() and len(sequences[name].output) < 12]
        free = rng.sample([row for row in range(40) if row not in at], len(running))
        for row, name in zip(free, running, strict=True):
            rows.add(row, sequences[name])
            at[row] = name
        batch = rng.sample(sorted(at), rng.randint(0, len(at)))
        logits = [step_logits(at[row], sequences[at[row]].position, vocab) for row in batch]
        tokens = rows.sample(torch.stack(logits), batch).token_ids.tolist() if batch else []
        for row, token_id in zip(batch, tokens, strict=True):
            seq = sequences[at[row]]
            seq.output.append(token_id)
            if len(seq.output) == 12:
                rows.free(row)
                del at[row]
    finished = [name for name in sequences if len(sequences[name].output) == 12]
    assert len(finished) > len(many) / 2
    for name, seq in sequences.items():
        assert seq.output == alone[name][: len(seq.output)], name


def test_a_seed_gives_the_same_tokens_and_another_seed_others():
    def run(seed: int) -> list[int]:
        rows, seq = Rows(1), ReferenceSequence(params(seed=seed), [1])
        rows.add(0, seq)
        for _ in range(20):
            seq.output += rows.sample(step_logits("x", seq.position).unsqueeze(0), [0]).token_ids.tolist()
        return seq.output

    assert run(7) == run(7) == run(7)
    assert run(7) != run(8)
    assert run(2**63 - 1) != run(2**31 - 1)  # the high word counts


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.03},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": ((3, 1.0),), "top_p": 0.95},
    ],
    ids=str,
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_sampled_tokens_follow_the_filtered_distribution(settings, vary):
    """Chi-square test of 10,000 tokens: over requests at one position, and over the positions of one request."""
    num, at_once = 10_000, 500
    rows = Rows(at_once)
    logits = step_logits("chi", 0).expand(at_once, -1)
    counts = np.zeros(VOCAB)
    for first in range(0, num, at_once):
        numbers = range(first, first + at_once)
        for row, number in enumerate(numbers):
            rows.add(row, ReferenceSequence(params(seed=number if vary == "seed" else 4, **settings), [5]))
        positions = [9] * at_once if vary == "seed" else list(numbers)
        tokens = rows.sampler.sample(logits, rows.state.gather(list(range(at_once)), positions)).token_ids
        counts += np.bincount(tokens, minlength=VOCAB)
    p = ReferenceSequence(params(**settings), [5]).expected(logits[0].numpy())
    assert counts[p == 0].sum() == 0
    expected = p * num
    large = expected >= 5
    pairs = [*zip(counts[large], expected[large], strict=True), (counts[~large].sum(), expected[~large].sum())]
    chi_square = sum((n - e) ** 2 / e for n, e in pairs if e > 0)
    freedom = len(pairs) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 4  # probability of more: below 0.001


# What each field does, with logits that say the answer.


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, 1),
        ({"logit_bias": ((3, 2.5),)}, 3),
        ({"logit_bias": ((1, -100.0),)}, 2),
        ({"bad_token_ids": (1,)}, 2),
        ({"bad_token_ids": (1, 2), "logit_bias": ((1, 100.0),)}, 3),
        ({"allowed_token_ids": (0, 3)}, 3),
        ({"allowed_token_ids": (0, 3), "logit_bias": ((1, 100.0),)}, 3),
        ({"allowed_token_ids": (0, 3), "bad_token_ids": (3,)}, 0),
        ({"allowed_token_ids": (0, 3), "bad_token_ids": (3, 0)}, 3),  # the bad ids would leave nothing
        ({"bad_token_ids": (0, 1, 2, 3)}, 1),
        ({"min_tokens": 1}, 3),  # stop ids are 1 and 2
        ({"min_tokens": 1, "allowed_token_ids": (1, 2)}, 1),
        ({"min_tokens": 1, "bad_token_ids": (0, 3)}, 1),
        ({"min_tokens": 1, "logit_bias": ((2, 50.0),)}, 3),
    ],
    ids=str,
)
def test_one_greedy_step(settings, expected):
    seq = ReferenceSequence(params(temperature=0.0, **settings), [0], stop_ids=(1, 2))
    assert sample_one([0.0, 4.0, 3.0, 2.0], seq) == expected


def test_min_tokens_counts_outputs_only_and_also_those_of_an_earlier_run():
    seq = ReferenceSequence(params(temperature=0.0, min_tokens=3), [0] * 10, stop_ids=(1,))
    seq.output = [2]  # resubmitted with one token
    rows = Rows(1, 3)
    rows.add(0, seq)
    for _ in range(3):
        seq.output += rows.sample(torch.tensor([[0.0, 9.0, 5.0]]), [0]).token_ids.tolist()
    assert seq.output == [2, 2, 2, 1]


def test_presence_and_frequency_count_output_only_and_repetition_the_prompt_too():
    def first_token(**settings) -> int:
        return sample_one([4.0, 3.0], ReferenceSequence(params(temperature=0.0, **settings), [0]))

    assert first_token(presence_penalty=2.0) == 0
    assert first_token(frequency_penalty=2.0) == 0
    assert first_token(repetition_penalty=2.0) == 1


def test_a_repetition_penalty_too_small_for_float32_is_not_zero():
    def first_token(logits: list[float]) -> int:
        return sample_one(logits, ReferenceSequence(params(temperature=0.0, repetition_penalty=1e-60), [1]))

    assert first_token([1.0, 0.0, -2.0]) == 0  # 0 / 0 would be NaN, which wins every comparison
    assert first_token([1.0, 1e-3, -2.0]) == 1
    assert first_token([-1.0, -3.0, -2.0]) == 1


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_a_logit_that_overflows_is_the_most_likely(settings):
    seq = ReferenceSequence(params(repetition_penalty=1e-60, **settings), [1])
    assert sample_one([1.0, 9.0, 2.0], seq) == 1


def test_logits_of_another_width_are_a_bug():
    rows = Rows(1)
    rows.add(0, ReferenceSequence(params(), [1]))
    with pytest.raises(AssertionError, match="151"):
        rows.sample(torch.zeros((1, VOCAB + 1)), [0])


def test_penalties_apply_to_tokens_the_host_has_not_seen():
    """Two steps are sampled one after the other without a look at the first one's token."""
    rows = Rows(2, 4)
    for row in range(2):
        rows.add(row, ReferenceSequence(params(temperature=0.0, presence_penalty=1.5), [3]))
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [5.0, 3.0, 2.0, 4.0]])
    steps = [rows.sampler.sample(logits, rows.state.gather([0, 1], [n, n])).token_ids for n in (1, 2, 3)]
    assert [step.tolist() for step in steps] == [[1, 0], [2, 3], [1, 0]]


def test_temperature_near_zero_is_greedy():
    for temperature in (0.0, 1e-300, 1e-7):
        assert sample_one([1.0, 1.0 + 1e-6, 0.0], ReferenceSequence(params(temperature=temperature), [0])) == 1


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_extreme_temperatures_stay_finite(temperature, scale):
    seq = ReferenceSequence(params(temperature=temperature, top_p=0.9), [0])
    logits = torch.linspace(-scale, scale, VOCAB)
    seq.check_and_append(logits.numpy(), sample_one(logits.tolist(), seq))


# What rows cost


def test_rows_without_penalties_allocate_no_history():
    rows = Rows(8)
    for row in range(8):
        rows.add(row, ReferenceSequence(params(top_k=5, logit_bias=((1, 1.0),)), list(range(100))))
    rows.sample(torch.zeros((8, VOCAB)), list(range(8)))
    assert rows.state.history.ids.numel() == 0


@pytest.mark.parametrize("frees", [True, False])
def test_a_row_that_comes_back_gives_its_history_slot_up(frees):
    rows = Rows(2)
    for _ in range(50):
        rows.add(1, ReferenceSequence(params(presence_penalty=1.0), [1]))
        if frees:
            rows.free(1)
    assert len(rows.state.history.ids) == FIRST_SLOTS


def test_rows_of_one_kind_are_read_in_place():
    """Neighbouring rows that go the same way make one group, whose logits are a view."""
    state = SamplingState(8, VOCAB, CPU)
    for row in range(8):
        state.add(NewSeq("seq", row, (1,), 1, params(temperature=0.0 if row < 5 else 1.0), ()))
    greedy, plain = state.gather([4, 0, 2, 6, 7, 5], [1] * 6).groups
    assert (greedy.at, plain.at) == (slice(0, 3), slice(3, 6))
    mixed = state.gather([4, 6, 2], [1] * 3).groups
    assert [(group.method, torch.arange(3)[group.at].tolist()) for group in mixed] == [("greedy", [0, 2]), ("all", [1])]


def test_large_vocabularies_are_taken_a_few_rows_at_a_time():
    vocab, num_rows = 100_000, 11
    rows = Rows(num_rows, vocab)
    for row in range(num_rows):
        rows.add(row, ReferenceSequence(params(seed=row, logit_bias=((row, 1.0),), logprobs=1), [1]))
    batch = rows.state.gather(list(range(num_rows)), [1] * num_rows)
    assert [group.at for group in batch.groups] == [slice(0, 5), slice(5, 10), slice(10, 11)]
    logits = torch.stack([step_logits(str(row), 1, vocab) for row in range(num_rows)])
    token_ids, logprobs = rows.sampler.sample(logits, batch).to_messages()
    for row in (0, 5, 10):
        rows.held[row].check_and_append(logits[row].numpy(), token_ids[row])
        assert logprobs[row].token_id == token_ids[row]


def test_an_empty_batch():
    assert Rows(2).sample(torch.zeros((0, VOCAB)), []).token_ids.shape == (0,)


def test_sampling_a_free_row_is_a_bug():
    rows = Rows(2)
    with pytest.raises(AssertionError, match="row 1"):
        rows.state.gather([1], [0])


def test_the_reference_by_hand():
    z = np.log(np.array([0.15, 0.5, 0.05, 0.2, 0.1], dtype=np.float32))
    kept = distribution(z, params(top_k=3, top_p=0.8))
    assert kept == pytest.approx([0, 5 / 7, 0, 2 / 7, 0], abs=1e-6)
    seq = ReferenceSequence(params(presence_penalty=1.0, frequency_penalty=0.5, temperature=0.0), [1])
    seq.output = [1, 1]
    assert Counter(seq.expected(z).tolist()) == {0.0: 4, 1.0: 1} and seq.expected(z)[3] == 1.0
