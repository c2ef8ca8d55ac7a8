"""A worker without a model that checks what a real one can't: that every block it would read holds the right tokens.

In place of K and V, a position's slot in a block holds a digest of all tokens up to that position. A step writes all of
its slots and then reads all that its positions attend to: a stale block, a wrong share, a block given away too early or
a wrong resumption is a wrong digest. The next token is a function of the whole history, so the tokens tell as well.
"""

from __future__ import annotations

import hashlib

from pagedray.engine.messages import NewSeq, PromptLogprobs, Request, RunnerOutput, SchedulerOutput, TokenLogprobs

VOCAB_SIZE = 50
EOS_ID = 0


def digest(parent: bytes, token_id: int) -> bytes:
    return hashlib.blake2b(parent + token_id.to_bytes(4, "little"), digest_size=8).digest()


def digests(token_ids: list[int], salt: str) -> list[bytes]:
    found = [salt.encode()]
    for token_id in token_ids:
        found.append(digest(found[-1], token_id))
    return found[1:]


def choose(history: bytes, seed: int) -> int:
    """The token after `history`; eos one time in 25."""
    value = int.from_bytes(hashlib.blake2b(history + seed.to_bytes(8, "little"), digest_size=8).digest(), "little")
    return value % VOCAB_SIZE if value % 2 else 1 + value % (VOCAB_SIZE - 1)


def solo(request: Request, max_model_len: int) -> tuple[tuple[int, ...], str]:
    """Tokens and finish reason of a request that has the machine for itself."""
    ids = [*request.prompt_ids, *request.output_ids]
    end_ids = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else (EOS_ID,))}
    history = digests(ids, request.cache_salt)[-1]
    while len(ids) < min(len(request.prompt_ids) + request.params.max_tokens, max_model_len):
        ids.append(choose(history, request.params.seed))
        history = digest(history, ids[-1])
        if ids[-1] in end_ids:
            return tuple(ids[len(request.prompt_ids) :]), "stop"
    return tuple(ids[len(request.prompt_ids) :]), "length"


def logprob_of(token_id: int, history: bytes) -> TokenLogprobs:
    """What stands for the log-probability of a token after `history`."""
    return TokenLogprobs(token_id, -history[0] / 256, 1, (), ())


class _Row:
    def __init__(self, new: NewSeq, salt: str, num_groups: int):
        self.new = new
        self.salt = salt
        self.token_ids = list(new.token_ids)
        self.digests = digests(self.token_ids, salt)
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_computed: int | None = None  # the first step tells how much the prefix cache had

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.digests.append(digest(self.digests[-1], token_id))


class SimulatedWorker:
    """Runs each step at once; the caller hands the results to the scheduler later, to imitate run-ahead."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        windows: tuple[int | None, ...],
        num_rows: int,
        max_tokens: int,
        max_chunk: int,
        salts: dict[str, str],
    ):
        self.block_size, self.windows = block_size, windows
        self.num_blocks, self.num_rows = num_blocks, num_rows
        self.max_tokens, self.max_chunk = max_tokens, max_chunk
        self.salts = salts  # of each request: not part of NewSeq, but part of what may be shared
        self.rows: dict[int, _Row] = {}
        self.slots: dict[tuple[int, int], tuple[int, bytes]] = {}  # block, offset → group, digest
        self.num_steps = 0
        self.num_computed = 0

    def run(self, out: SchedulerOutput) -> RunnerOutput:
        assert out.step == self.num_steps, "a step is missing"
        self.num_steps += 1
        self._apply(out)
        written: set[tuple[int, int]] = set()
        for seq in out.scheduled:
            row = self.rows[seq.row]
            for position in range(seq.start, seq.start + seq.num_tokens):
                for group in range(len(self.windows)):
                    slot = self._slot(row, group, position)
                    assert slot not in written, f"{seq.seq_id}: two writes to one slot in one step"
                    written.add(slot)
                    self.slots[slot] = group, row.digests[position]
        for seq in out.scheduled:
            self._read(self.rows[seq.row], seq.start, seq.start + seq.num_tokens)
        return self._sample(out)

    def _apply(self, out: SchedulerOutput) -> None:
        for freed in out.freed_rows:
            del self.rows[freed]
        for new in out.added:
            assert new.row not in self.rows and 0 <= new.row < self.num_rows
            self.rows[new.row] = _Row(new, self.salts[new.seq_id], len(self.windows))
        assert 0 < out.num_tokens <= self.max_tokens
        assert len({seq.row for seq in out.scheduled}) == len(out.scheduled), "a row is in a step twice"
        assert {new.row for new in out.added} <= {seq.row for seq in out.scheduled}, "a row is added and not computed"
        singles = [seq.num_tokens == 1 for seq in out.scheduled]
        assert singles == sorted(singles, reverse=True), "single tokens come first"
        for seq in out.scheduled:
            row = self.rows[seq.row]
            assert row.new.seq_id == seq.seq_id
            assert seq.start == (row.num_computed if row.num_computed is not None else seq.start), "not contiguous"
            assert 1 <= seq.num_tokens <= self.max_chunk
            row.num_computed = seq.start + seq.num_tokens
            assert row.num_computed <= len(row.token_ids), "a token is computed before it is known"
            assert seq.samples == (row.num_computed == len(row.token_ids))
            self.num_computed += seq.num_tokens
            for table, blocks in zip(row.tables, seq.new_blocks, strict=True):
                assert all(0 <= block <= self.num_blocks for block in blocks)
                table += blocks
            assert len({len(table) for table in row.tables}) == 1
            assert (len(row.tables[0]) - 1) * self.block_size < row.num_computed, "a block before it is needed"

    def _slot(self, row: _Row, group: int, position: int) -> tuple[int, int]:
        block = row.tables[group][position // self.block_size]
        assert block != 0, f"{row.new.seq_id}: position {position} of group {group} is in the null block"
        return block, position % self.block_size

    def _read(self, row: _Row, start: int, end: int) -> None:
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                found = self.slots.get(self._slot(row, group, position))
                assert found == (group, row.digests[position]), (
                    f"{row.new.seq_id}: wrong K/V at position {position} of group {group}, computing {start} … {end}"
                )

    def _sample(self, out: SchedulerOutput) -> RunnerOutput:
        tokens, logprobs, prompt_logprobs = [], [], []
        for seq in out.scheduled:
            row, params = self.rows[seq.row], self.rows[seq.row].new.params
            token, logprob, found = -1, None, None
            if seq.samples:
                history = row.digests[-1]
                token = choose(history, params.seed)
                row.append(token)
                logprob = None if params.logprobs is None else logprob_of(token, history)
            if params.prompt_logprobs is not None:
                targets = range(seq.start + 1, min(seq.start + seq.num_tokens + 1, row.new.num_prompt_tokens))
                entries = tuple(logprob_of(row.token_ids[t], row.digests[t - 1]) for t in targets)
                found = PromptLogprobs(targets.start, entries) if entries else None
            tokens.append(token)
            logprobs.append(logprob)
            prompt_logprobs.append(found)
        return RunnerOutput(
            out.step,
            tuple(tokens),
            tuple(logprobs) if any(logprobs) else (),
            tuple(prompt_logprobs) if any(prompt_logprobs) else (),
        )
