"""Made-up steps keep the rules of real ones, whatever the engine's limits."""

import pytest

from pagedray.engine.worker.kv_cache import CacheSize
from pagedray.engine.worker.warm_up import MadeUpSteps


def steps(max_tokens: int = 100, num_rows: int = 6, max_model_len: int = 64, num_blocks: int = 3) -> MadeUpSteps:
    size = CacheSize(num_blocks, 1, max_model_len, max_model_len)
    return MadeUpSteps(size, 2, 4, max_tokens, num_rows)


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 1, "num_rows": 1}, {"num_rows": 1}, {"max_model_len": 2}])
@pytest.mark.parametrize("which", ["everything", "widest", "on a cpu"])
def test_rows_are_taken_once_filled_in_order_and_given_back(limits: dict[str, int], which: str) -> None:
    made = steps(**limits)
    computed: dict[int, int] = {}
    last_step = None
    for out in made.widest() if which == "widest" else made.everything(which == "everything"):
        assert last_step is None or out.step == last_step + 1
        last_step = out.step
        for row in out.freed_rows:
            del computed[row]
        for new in out.added:
            assert new.row not in computed and new.row < limits.get("num_rows", 6)
            assert len(new.token_ids) < limits.get("max_model_len", 64)
            computed[new.row] = 0
        assert out.num_tokens <= limits.get("max_tokens", 100)
        for seq in out.scheduled:
            assert seq.start == computed[seq.row]
            computed[seq.row] += seq.num_tokens
            assert all(0 < block <= 3 for blocks in seq.new_blocks for block in blocks)
    assert computed == {}


def test_the_widest_steps_are_as_wide_as_steps_get() -> None:
    lengths = [[seq.num_tokens for seq in out.scheduled] for out in steps().widest() if out.scheduled]
    assert lengths == [[63, 37], [1] * 6]
    assert [len(out.scheduled) for out in steps(num_rows=1).widest()] == [1, 0, 1, 0]
