"""The scheduler's record of one request, from its acceptance to its end."""

from __future__ import annotations

from pagedray.engine.messages import FinishReason, NewSeq, PromptLogprobs, Request, RequestUpdate
from pagedray.engine.policy import Rank
from pagedray.engine.prefix_cache import hash_block, root_hash

NO_ROW = -1
NO_TOKEN = -1  # in RunnerOutput: the row did not sample


class Sequence:
    """Tokens, and how much of their K/V there is.

    `num_computed` counts positions that were planned, whether or not their step has run: steps run in the order of
    their plans. The token at position `num_computed` may itself still be in flight; `token_ids` holds known ones only.
    """

    __slots__ = (
        "accepted_s",
        "block_hashes",
        "decode_limit",
        "id",
        "is_finished",
        "last_at",
        "max_len",
        "next_prompt_logprob",
        "num_awaited",
        "num_cached",
        "num_computed",
        "num_dropped",
        "num_prompt",
        "num_registered",
        "rank",
        "register_at",
        "request",
        "row",
        "special_ids",
        "stop_ids",
        "tables",
        "token_ids",
        "was_admitted",
    )

    def __init__(self, request: Request, rank: Rank, max_len: int, eos_ids: tuple[int, ...], accepted_s: float):
        params = request.params
        self.request = request
        self.id = request.id
        self.rank = rank
        self.accepted_s = accepted_s
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        self.num_prompt = len(request.prompt_ids)
        self.max_len = max_len  # prompt and output
        self.stop_ids = tuple(dict.fromkeys(params.stop_token_ids + (() if params.ignore_eos else eos_ids)))
        self.special_ids = frozenset((*self.stop_ids, NO_TOKEN))  # results that are not simply appended
        self.block_hashes = list(request.block_hashes)  # of full blocks, as far as they were needed
        self.was_admitted = False
        self.num_cached = 0  # prompt tokens that the prefix cache had at first admission
        self.next_prompt_logprob = 1  # position of the first prompt token whose log-probability was not delivered
        self.is_finished = False
        self.num_awaited = 0  # of a preempted sequence: sampled tokens that steps in flight still deliver
        self.leave()

    def leave(self) -> None:
        """Hold neither row nor blocks: the state before admission and after preemption."""
        self.row = NO_ROW
        self.num_computed = 0
        self.tables: list[list[int]] = []  # per block group; 0 where the block fell out of the window
        self.num_dropped: list[int] = []  # per block group: how many leading entries are 0
        self.num_registered = 0  # leading blocks that the prefix cache was told of
        # What the loops over decoding sequences compare with; 0 leaves the short way.
        self.decode_limit = 0  # positions below it need no new block and are computed one a step
        self.last_at = 0  # the number of tokens that the next one completes
        self.register_at = 0  # the number of tokens from which on the prefix cache may be told of another block

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_in_flight(self) -> int:
        """Tokens that steps in flight sample."""
        return self.num_awaited if self.row == NO_ROW else max(0, self.num_computed + 1 - len(self.token_ids))

    @property
    def is_prefilling(self) -> bool:
        """More than one known token is still to be computed."""
        return self.num_computed + 1 < len(self.token_ids)

    def hashes(self, count: int, block_size: int) -> list[bytes]:
        """Chained hashes of at least the first `count` blocks, whose tokens are known."""
        known = self.block_hashes
        while len(known) < count:
            start = len(known) * block_size
            parent = known[-1] if known else root_hash(self.request.cache_salt)
            known.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return known

    def held_blocks(self) -> list[int]:
        """Blocks of all groups, the ones of the last tokens first."""
        rows = zip(*(reversed(table) for table in self.tables), strict=True)
        return [block for row in rows for block in row if block]

    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt tokens are still to be computed for their log-probabilities, cached or not."""
        return self.request.params.prompt_logprobs is not None and self.next_prompt_logprob < self.num_prompt

    def undelivered(self, found: PromptLogprobs) -> tuple[PromptLogprobs, ...]:
        """What of `found` was not delivered before; it counts as delivered from now on."""
        entries = found.entries[max(0, self.next_prompt_logprob - found.start) :]
        if not entries:
            return ()
        start = found.start + len(found.entries) - len(entries)
        assert start == self.next_prompt_logprob, (
            f"{self.id}: prompt logprobs {self.next_prompt_logprob} … {start} are missing"
        )
        self.next_prompt_logprob += len(entries)
        return (PromptLogprobs(start, entries),)

    def as_new(self) -> NewSeq:
        return NewSeq(self.id, self.row, tuple(self.token_ids), self.num_prompt, self.request.params, self.stop_ids)

    def ended(self, reason: FinishReason, error: str) -> RequestUpdate:
        """The update of an end that no token brought."""
        return RequestUpdate(self.id, self.num_output, (), reason, None, error, num_cached_tokens=self.num_cached)
