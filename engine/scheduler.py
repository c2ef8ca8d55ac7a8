"""Which tokens to compute next.

One rule: a sequence has tokens it should have computed and tokens it has; a step gives each sequence some of the
difference, running ones first, within the step's token budget and the block pool. Prefill, decode, chunks, prefix hits
and resumption after preemption are all that rule.

Why it can't stall: sequences are served in the order of their rank and take blocks from lower ranks alone, so the first
one always advances; whatever could never fit the pool is refused by `add`, so the first one always can.

No torch, no clock, no I/O: plain integers in, a message out, time is an argument.
"""

from __future__ import annotations

import bisect
import operator
from collections import deque
from itertools import pairwise

import msgspec

from pagedray.engine.block_tables import BlockTables, NewBlocks
from pagedray.engine.errors import ConfigError, Overloaded, PromptTooLong, UserError
from pagedray.engine.messages import (
    FinishReason,
    NewSeq,
    PromptLogprobs,
    Request,
    RequestUpdate,
    RunnerOutput,
    ScheduledSeq,
    SchedulerOutput,
    TokenLogprobs,
)
from pagedray.engine.metrics import SchedulerStats
from pagedray.engine.policy import POLICIES
from pagedray.engine.prefix_cache import PrefixCache
from pagedray.engine.sequence import NO_ROW, NO_TOKEN, Sequence

_by_rank = operator.attrgetter("rank")
_NEVER = float("inf")


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    max_tokens_per_step: int
    max_model_len: int
    prefill_chunk_tokens: int | None
    max_queued_requests: int
    max_queued_tokens: int
    num_turns: int = 1  # steps over which decoding sequences are spread, so that a pipeline's stages have one each


class _Plan:
    """A step while it is put together."""

    def __init__(self, spare: int):
        self.spare = spare  # tokens left when each decoding sequence has got its one
        self.reserved = 0  # blocks that sequences already considered still take for tokens they have
        self.added: list[NewSeq] = []
        self.singles: list[ScheduledSeq] = []  # one token each: first in the step
        self.chunks: list[ScheduledSeq] = []
        self.single_seqs: list[Sequence] = []
        self.chunk_seqs: list[Sequence] = []

    @property
    def num_seqs(self) -> int:
        return len(self.singles) + len(self.chunks)

    def append(self, seq: Sequence, num_tokens: int, samples: bool, new_blocks: NewBlocks) -> None:
        entry = ScheduledSeq(seq.id, seq.row, seq.num_computed, num_tokens, samples, new_blocks)
        seq.num_computed += num_tokens
        if num_tokens == 1:
            self.singles.append(entry)
            self.single_seqs.append(seq)
        else:
            self.chunks.append(entry)
            self.chunk_seqs.append(seq)


class Scheduler:
    """The queue, the running sequences and their blocks.

    `add` and `abort` may be called at any time. `schedule` plans a step, and further ones before the first one's result
    is known; each plan it returns must be run, in that order. `commit` takes the results in the same order.

    Args:
        num_blocks: usable KV blocks, ids 1 … num_blocks; block 0 is the null page.
        windows: per block group its sliding window in tokens, None for full attention.

    Raises:
        ConfigError: the blocks can't hold a single token.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        block_size: int,
        num_blocks: int,
        windows: tuple[int | None, ...],
        eos_ids: tuple[int, ...],
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
    ):
        self.limits = limits
        self.running: list[Sequence] = []  # by rank
        self.waiting: list[Sequence] = []  # by rank; within a class all of them rank behind the running ones
        self._seqs: dict[str, Sequence] = {}  # both
        self._chunk = min(limits.prefill_chunk_tokens or limits.max_tokens_per_step, limits.max_tokens_per_step)
        self._blocks = BlockTables(
            block_size=block_size,
            num_blocks=num_blocks,
            windows=windows,
            chunk=self._chunk,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._capacity = self._blocks.capacity_tokens(limits.max_model_len)
        if self._capacity < 1:
            raise ConfigError(f"num_kv_blocks: {num_blocks} blocks can't hold a token in {len(windows)} block groups")
        self._block_size = block_size
        self._eos_ids = eos_ids
        self._rank = POLICIES[policy]
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed_rows: list[int] = []  # since the last plan
        self._prefilling: set[str] = set()  # running ones that have more than one known token to compute
        self._in_flight: deque[tuple[int, list[Sequence]]] = deque()
        self._sampling: deque[frozenset[str]] = deque(maxlen=limits.num_turns - 1)  # ids, of the last steps planned
        self._updates: list[RequestUpdate] = []
        self._next_step = 0
        self._num_accepted = 0
        self._queued_tokens = 0
        self._next_deadline_s = _NEVER
        self._queried_tokens = self._hit_tokens = self._num_preemptions = 0

    # Requests

    def add(self, requests: tuple[Request, ...], now_s: float) -> None:
        """Queue the choices of one client request, all or none. A repeated submission is ignored.

        Raises:
            UserError, PromptTooLong: no state of the queue and the pool could serve it.
            Overloaded: the queue is full.
        """
        if any(request.id in self._seqs for request in requests):
            return
        for request in requests:
            self._check(request)
        limits, num, tokens = self.limits, len(requests), sum(len(request.prompt_ids) for request in requests)
        if num > limits.max_queued_requests:
            raise UserError(f"n is {num}, the queue takes {limits.max_queued_requests} (max_queued_requests)", "n")
        if len(self.waiting) + num > limits.max_queued_requests:
            raise Overloaded(
                f"{len(self.waiting)} sequences are queued, {num} more exceed the limit of "
                f"{limits.max_queued_requests} (max_queued_requests)"
            )
        if self._queued_tokens + tokens > limits.max_queued_tokens:
            raise Overloaded(
                f"{self._queued_tokens} prompt tokens are queued, {tokens} more exceed the limit of "
                f"{limits.max_queued_tokens} (max_queued_tokens)"
            )
        for request in requests:
            self._num_accepted += 1
            rank = self._rank(request, self._num_accepted)
            seq = Sequence(request, rank, self._max_len(request), self._eos_ids, now_s)
            if len(seq.token_ids) >= seq.max_len:  # resubmitted with nothing left to generate
                self._updates.append(RequestUpdate(seq.id, seq.num_output, (), "length"))
                continue
            if len(seq.block_hashes) != seq.num_prompt // self._block_size:
                seq.block_hashes.clear()
            self._seqs[seq.id] = seq
            self._enqueue(seq)
            if request.deadline_s is not None:
                self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)

    def abort(self, request_id: str, reason: str) -> RequestUpdate | None:
        """End a request in whatever state it is; None if there is no such request. Its blocks are free at once."""
        seq = self._seqs.get(request_id)
        if seq is None:
            return None
        self._drop(seq)
        return seq.ended("abort", reason)

    def take_updates(self) -> list[RequestUpdate]:
        """Ends that were decided while adding or scheduling."""
        updates, self._updates = self._updates, []
        return updates

    def _max_len(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.params.max_tokens, self.limits.max_model_len)

    def _check(self, request: Request) -> None:
        num, room = len(request.prompt_ids), self._capacity + 1  # nothing reads the K/V of the last token
        if num == 0:
            raise UserError("the prompt is empty; give at least one token", "prompt")
        if request.params.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {request.params.max_tokens}", "max_tokens")
        if num >= self.limits.max_model_len:
            raise PromptTooLong(num, self.limits.max_model_len - 1, "max_model_len")
        if num >= room:
            raise PromptTooLong(num, room - 1, "KV cache size; raise kv_cache_memory_bytes")
        if self._max_len(request) > room:
            raise UserError(
                f"the prompt's {num} tokens and max_tokens {request.params.max_tokens} exceed the {room} tokens that "
                f"the KV cache allows; ask for at most {room - num} or raise kv_cache_memory_bytes",
                "max_tokens",
            )

    # A step's plan

    def schedule(self, now_s: float) -> SchedulerOutput | None:
        """Plan the next step; None when there is nothing to compute."""
        self._updates += self._expire(now_s)
        plan = _Plan(self.limits.max_tokens_per_step - len(self.running) + len(self._prefilling))
        order, others = self._in_order(), list[Sequence]()
        if self.limits.num_turns > 1:
            order, others = self._in_turn(order)
        self._plan_running(order, plan)
        if others and not plan.num_seqs:  # those whose turn it is lack blocks, which others have
            self._plan_running(others, plan)
        while self.waiting and self._admit(self.waiting[0], plan, may_preempt=False):
            pass
        seqs = plan.single_seqs + plan.chunk_seqs
        if not seqs:
            return None
        step, freed_rows = self._next_step, tuple(self._freed_rows)
        self._freed_rows.clear()
        self._in_flight.append((step, seqs))
        self._next_step += 1
        scheduled = tuple(plan.singles + plan.chunks)
        if self.limits.num_turns > 1:
            self._sampling.append(frozenset(entry.seq_id for entry in scheduled if entry.samples))
        return SchedulerOutput(step, tuple(plan.added), scheduled, freed_rows)

    def _plan_running(self, order: list[Sequence], plan: _Plan) -> None:
        append, append_seq, no_blocks = plan.singles.append, plan.single_seqs.append, self._blocks.no_blocks
        for seq in order:
            start = seq.num_computed
            if start < seq.decode_limit:
                append(ScheduledSeq(seq.id, seq.row, start, 1, True, no_blocks))
                append_seq(seq)
                seq.num_computed = start + 1
            elif seq.row != NO_ROW:
                self._advance(seq, plan)
            elif seq is self.waiting[0]:
                self._admit(seq, plan, may_preempt=True)

    def _in_turn(self, order: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """All but the decoding sequences whose turn it is not, and those.

        It is the turn of those that none of the last steps samples for, at most an even share of all. Where that is
        nobody, since there are fewer sequences than turns, it is that of those sampled for longest ago.
        """
        decoding = [seq for seq in order if seq.row != NO_ROW and not seq.is_prefilling]
        wanting = [seq for seq in decoding if seq.num_computed < seq.max_len - 1]
        share = -(-len(wanting) // self.limits.num_turns)
        chosen: list[Sequence] = []
        recent = list(self._sampling)
        while wanting and not chosen:
            chosen = [seq for seq in wanting if not any(seq.id in ids for ids in recent)][:share]
            recent = recent[1:]
        left = {seq.id for seq in wanting} - {seq.id for seq in chosen}
        return [seq for seq in order if seq.id not in left], [seq for seq in order if seq.id in left]

    def _in_order(self) -> list[Sequence]:
        """Running sequences by rank, and among them waiting ones of a better class than some running one.

        Each comes before all that it may take blocks from, so a victim is never part of the plan already.
        """
        order = self.running[:]
        if self.waiting and order and self.waiting[0].rank[0] < order[-1].rank[0]:
            worst = order[-1].rank[0]
            order += [seq for seq in self.waiting[: self.limits.max_num_seqs] if seq.rank[0] < worst]
            order.sort(key=_by_rank)
        return order

    def _advance(self, seq: Sequence, plan: _Plan) -> None:
        """Plan what a running sequence lacks, as far as budget and blocks go."""
        start, want = seq.num_computed, 1
        if start >= seq.max_len - 1:
            return  # its last token is in flight
        if is_prefilling := seq.is_prefilling:
            want = min(len(seq.token_ids) - start, self._chunk, plan.spare)
        new_blocks = self._extend(seq, start + want, plan) if want > 0 else None
        if new_blocks is None:
            plan.reserved += self._blocks.demand(seq)
        elif is_prefilling:
            self._plan_known(seq, want, plan, new_blocks)
        else:
            plan.append(seq, 1, True, new_blocks)
            self._set_decode_limit(seq)

    def _extend(self, seq: Sequence, end: int, plan: _Plan) -> NewBlocks | None:
        """Blocks up to position `end`, if need be taken from the last in rank; None if that is `seq` itself."""
        while (new_blocks := self._blocks.extend(seq, end)) is None and self.running[-1] is not seq:
            self._preempt(self.running[-1], plan)
        return new_blocks  # with None it keeps what it holds and waits; those before it advance

    def _admit(self, seq: Sequence, plan: _Plan, may_preempt: bool) -> bool:
        """Give the first waiting sequence a row and plan its first tokens, if all its known tokens find room."""
        if seq.num_awaited or not (may_preempt or self._has_place(plan)):
            return False
        hits = self._blocks.find_hits(seq)
        if not self._fits(seq, hits, plan) and not (may_preempt and self._preempt_for(seq, hits, plan)):
            return False
        self._dequeue(seq)
        bisect.insort(self.running, seq, key=_by_rank)
        seq.row = self._free_rows.pop()
        self._blocks.admit(seq, hits)
        if not seq.was_admitted:
            seq.was_admitted = True
            seq.num_cached = min(seq.num_computed, seq.num_prompt)
            self._queried_tokens += seq.num_prompt if self._blocks.may_hit(seq) else 0
            self._hit_tokens += seq.num_cached
        plan.added.append(seq.as_new())
        want = min(len(seq.token_ids) - seq.num_computed, self._chunk, plan.spare)
        self._blocks.extend(seq, seq.num_computed + want)
        self._plan_known(seq, want, plan, tuple(tuple(table) for table in seq.tables))
        return True

    def _plan_known(self, seq: Sequence, num: int, plan: _Plan, new_blocks: NewBlocks) -> None:
        """Plan `num` tokens that are known: those of a prompt, or of a sequence that resumes."""
        plan.spare -= num
        plan.append(seq, num, seq.num_computed + num == len(seq.token_ids), new_blocks)
        self._register(seq)
        if seq.is_prefilling:
            self._prefilling.add(seq.id)
            plan.reserved += self._blocks.demand(seq)
        else:
            self._prefilling.discard(seq.id)
            self._set_decode_limit(seq)

    def _set_decode_limit(self, seq: Sequence) -> None:
        seq.last_at = seq.max_len - 1
        seq.decode_limit = min(len(seq.tables[0]) * self._block_size, seq.max_len - 1)

    def _register(self, seq: Sequence) -> None:
        self._blocks.register(seq)
        seq.register_at = (seq.num_registered + 1) * self._block_size

    def _shortage(self, seq: Sequence, hits: list[list[int]], plan: _Plan) -> int:
        """Blocks lacking to admit a waiting sequence.

        What sequences before it still take is kept back, and a block more of each group for each of them: otherwise
        newcomers would be admitted only to be preempted some steps later.
        """
        num_before = bisect.bisect(self.running, seq.rank, key=_by_rank)
        kept_back = plan.reserved + num_before * len(self._blocks.windows)
        return self._blocks.blocks_to_admit(seq, hits) + kept_back - self._blocks.pool.num_free

    def _has_place(self, plan: _Plan) -> bool:
        return plan.spare > 0 and bool(self._free_rows)

    def _fits(self, seq: Sequence, hits: list[list[int]], plan: _Plan) -> bool:
        return self._has_place(plan) and self._shortage(seq, hits, plan) <= 0

    # Preemption and ends

    def _preempt_for(self, seq: Sequence, hits: list[list[int]], plan: _Plan) -> bool:
        """Make a waiting sequence fit by preempting running ones of a worse class, unless all of them would not do."""
        victims = [other for other in self.running if other.rank[0] > seq.rank[0]]
        if plan.spare < 1 and all(victim.is_prefilling for victim in victims):
            return False
        if self._shortage(seq, hits, plan) > sum(len(victim.held_blocks()) for victim in victims):
            return False
        while victims and not self._fits(seq, hits, plan):
            self._preempt(victims.pop(), plan)
        return self._fits(seq, hits, plan)

    def _preempt(self, seq: Sequence, plan: _Plan) -> None:
        """Take row and blocks from a running sequence that is not part of the plan; it computes its tokens again later.

        Tokens that steps in flight sample for it still count, so it awaits them before it can be admitted again.
        """
        if not seq.is_prefilling:
            plan.spare += 1
        seq.num_awaited = seq.num_in_flight
        self._leave(seq)
        self._enqueue(seq)
        self._num_preemptions += 1

    def _enqueue(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=_by_rank)
        self._queued_tokens += seq.num_prompt

    def _dequeue(self, seq: Sequence) -> None:
        del self.waiting[bisect.bisect_left(self.waiting, seq.rank, key=_by_rank)]
        self._queued_tokens -= seq.num_prompt

    def _leave(self, seq: Sequence) -> None:
        del self.running[bisect.bisect_left(self.running, seq.rank, key=_by_rank)]
        self._free_rows.append(seq.row)
        self._freed_rows.append(seq.row)
        self._prefilling.discard(seq.id)
        self._blocks.register(seq)
        self._blocks.release(seq)
        seq.leave()

    def _drop(self, seq: Sequence) -> None:
        if seq.row == NO_ROW:
            self._dequeue(seq)
        else:
            self._leave(seq)
        seq.is_finished = True
        del self._seqs[seq.id]

    def _expire(self, now_s: float) -> list[RequestUpdate]:
        """End the requests whose deadline has passed."""
        if now_s < self._next_deadline_s:
            return []
        updates, self._next_deadline_s = [], _NEVER
        for seq in list(self._seqs.values()):
            deadline_s = seq.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._drop(seq)
                reason = f"its deadline passed {now_s - seq.accepted_s:.1f} s after it was accepted"
                updates.append(seq.ended("abort", reason))
            elif deadline_s is not None:
                self._next_deadline_s = min(self._next_deadline_s, deadline_s)
        return updates

    # A step's result

    def commit(self, out: RunnerOutput, now_s: float) -> list[RequestUpdate]:
        """Take the oldest step's tokens; one update for each sequence that got something or ended."""
        step, seqs = self._in_flight.popleft()
        assert out.step == step, f"result of step {out.step}, awaited step {step}"
        failed = self._fail(out.failed) if out.failed else []  # first: their tokens of this step don't count
        if out.logprobs or out.prompt_logprobs:
            nothing = (None,) * len(seqs)
            rows = zip(seqs, out.token_ids, out.logprobs or nothing, out.prompt_logprobs or nothing, strict=True)
            updates = [update for row in rows if (update := self._deliver(*row)) is not None]
        else:
            updates = self._deliver_plain(seqs, out.token_ids)
        return failed + updates + self._expire(now_s)

    def _fail(self, failed: tuple[tuple[str, str], ...]) -> list[RequestUpdate]:
        """End requests that a worker can't go on with; they may have ended otherwise meanwhile."""
        updates = []
        for seq_id, reason in failed:
            seq = self._seqs.get(seq_id)
            if seq is not None:
                self._drop(seq)
                updates.append(seq.ended("error", reason))
        return updates

    def _deliver_plain(self, seqs: list[Sequence], token_ids: tuple[int, ...]) -> list[RequestUpdate]:
        updates: list[RequestUpdate] = []
        append = updates.append
        for seq, token in zip(seqs, token_ids, strict=True):
            ids = seq.token_ids
            num = len(ids)
            if num < seq.last_at and token not in seq.special_ids:
                ids.append(token)
                append(RequestUpdate(seq.id, num - seq.num_prompt, (token,), None, None, None, (), (), seq.num_cached))
                if num >= seq.register_at:
                    self._register(seq)
            elif (update := self._deliver(seq, token)) is not None:
                append(update)
        return updates

    def _deliver(
        self,
        seq: Sequence,
        token: int,
        logprob: TokenLogprobs | None = None,
        found: PromptLogprobs | None = None,
    ) -> RequestUpdate | None:
        if seq.is_finished:
            return None
        prompt_logprobs = () if found is None else seq.undelivered(found)
        first = seq.num_output
        if token == NO_TOKEN:
            if not prompt_logprobs:
                return None
            return RequestUpdate(seq.id, first, (), prompt_logprobs=prompt_logprobs, num_cached_tokens=seq.num_cached)
        seq.token_ids.append(token)
        if seq.row == NO_ROW:
            seq.num_awaited -= 1
        else:
            self._register(seq)
        reason: FinishReason | None = None
        if token in seq.special_ids:
            reason = "stop"
        elif len(seq.token_ids) == seq.max_len:
            reason = "length"
        if reason is not None:
            self._drop(seq)
        stop_id = token if reason == "stop" else None
        logprobs = () if logprob is None else (logprob,)
        return RequestUpdate(seq.id, first, (token,), reason, stop_id, None, logprobs, prompt_logprobs, seq.num_cached)

    # State

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def prefix_cache(self) -> PrefixCache:
        return self._blocks.cache

    def has_work(self) -> bool:
        return bool(self._seqs or self._in_flight)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_used_blocks=self._blocks.pool.num_used,
            num_blocks=self._blocks.pool.num_blocks,
            num_queued_tokens=self._queued_tokens,
            prefix_queried_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
            num_preemptions=self._num_preemptions,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't agree."""
        self._blocks.check_invariants(self.running)
        rows = [seq.row for seq in self.running] + self._free_rows
        assert sorted(rows) == list(range(self.limits.max_num_seqs)), "a row is lost or held twice"
        listed = self.running + self.waiting
        assert len(listed) == len(self._seqs) and all(self._seqs[seq.id] is seq for seq in listed), "a request is lost"
        for seq in listed:
            assert len(seq.block_hashes) * self._block_size <= len(seq.token_ids), f"{seq.id}: a hash of unknown tokens"
        for seqs in (self.running, self.waiting):
            assert all(a.rank < b.rank for a, b in pairwise(seqs)), "a list is out of order"
        first_waiting = {seq.rank[0]: seq.rank for seq in reversed(self.waiting)}
        for seq in self.running:
            assert seq.rank < first_waiting.get(seq.rank[0], (seq.rank[0] + 1, 0)), f"{seq.id} has overtaken its class"
            assert len(seq.token_ids) < seq.max_len and seq.num_computed < seq.max_len, f"{seq.id} went on too long"
        for seq in self.waiting:
            assert seq.row == NO_ROW and not seq.tables, f"{seq.id} waits and holds something"
            assert self._in_flight or not seq.num_awaited, f"{seq.id} awaits tokens and no step is in flight"
        assert self._queued_tokens == sum(seq.num_prompt for seq in self.waiting), "queued tokens are miscounted"
        assert self._prefilling == {seq.id for seq in self.running if seq.is_prefilling}, (
            "prefilling ones are miscounted"
        )
