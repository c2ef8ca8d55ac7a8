import random
from collections import Counter

import torch

from pagedray.engine.worker.token_history import FIRST_SLOTS, FIRST_WIDTH, TokenHistory

CPU = torch.device("cpu")


def contents(history: TokenHistory, row: int) -> dict[int, int]:
    (slot,) = history.slot_numbers([row])
    used = int(history.num_unique[slot])
    ids = history.ids[slot, :used].tolist()
    assert len(set(ids)) == used
    return dict(zip(ids, history.counts[slot, :used].tolist(), strict=True))


def test_nothing_is_allocated_until_a_row_needs_it():
    assert TokenHistory(CPU).ids.numel() == 0


def test_prompt_tokens_have_no_count_until_they_are_generated():
    history = TokenHistory(CPU)
    history.add(7, seen=[5, 6, 5], output=[6, 9, 9])
    assert contents(history, 7) == {5: 0, 6: 1, 9: 2}
    history.count(history.slots([7]), torch.tensor([5]))
    history.count(history.slots([7]), torch.tensor([8]))
    assert contents(history, 7) == {5: 1, 6: 1, 9: 2, 8: 1}


def test_a_reused_slot_starts_anew():
    history = TokenHistory(CPU)
    history.add(0, seen=[], output=[3, 3, 4, 5])
    history.free(0)
    history.free(0)  # a row without a slot
    history.add(1, seen=[], output=[])
    assert contents(history, 1) == {}
    z = torch.ones((1, 8))
    history.penalise(
        z, torch.tensor([0]), history.slots([1]), torch.tensor([[2.0, 1.0, 1.0]]).index_fill(1, torch.tensor([0]), 1.0)
    )
    assert torch.equal(z, torch.ones((1, 8)))
    for token in (5, 4, 5):  # what the slot still holds of its former row is not this row's
        history.count(history.slots([1]), torch.tensor([token]))
    assert contents(history, 1) == {5: 2, 4: 1}


def test_slots_and_width_grow_while_rows_are_counted():
    """Counts equal a Counter's for more rows than the first slots, and longer outputs than the first width."""
    rng = random.Random(1)
    history, outputs = TokenHistory(CPU), {}
    for row in range(FIRST_SLOTS + 3):
        outputs[row] = [rng.randrange(2000) for _ in range(row)]
        history.add(row, seen=[], output=outputs[row])
    for _ in range(FIRST_WIDTH + 80):
        rows = rng.sample(sorted(outputs), 3)
        tokens = [rng.choice([rng.randrange(2000), 4]) for _ in rows]
        history.count(history.slots(rows), torch.tensor(tokens))
        for row, token in zip(rows, tokens, strict=True):
            outputs[row].append(token)
    history.add(100, seen=range(5 * FIRST_WIDTH), output=[])
    assert contents(history, 100) == dict.fromkeys(range(5 * FIRST_WIDTH), 0)
    for row, output in outputs.items():
        assert contents(history, row) == Counter(output)


def test_freed_slots_are_used_again():
    history = TokenHistory(CPU)
    for row in range(100):
        history.add(row, seen=[], output=[row])
        if row >= FIRST_SLOTS:
            history.free(row - FIRST_SLOTS)
    assert len(history.num_unique) == 2 * FIRST_SLOTS
