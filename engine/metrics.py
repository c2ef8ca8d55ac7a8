"""What an engine counts, for health, /metrics and the periodic log line. Counters only grow while it lives."""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    num_queued_tokens: int  # prompt tokens of waiting sequences
    prefix_queried_tokens: int  # counter: prompt tokens looked up in the prefix cache
    prefix_hit_tokens: int  # counter: of these, found
    num_preemptions: int  # counter

    @property
    def kv_usage(self) -> float:
        return self.num_used_blocks / self.num_blocks


class EngineLoad(msgspec.Struct, frozen=True):
    """How full an engine is; above 1 where requests wait."""

    batch: float  # sequences there, of those that it computes at a time
    kv: float  # blocks that are held or that waiting prompts will need, of all

    @property
    def worst(self) -> float:
        return max(self.batch, self.kv)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    engine_id: str
    scheduler: SchedulerStats
    num_steps: int  # counter: committed steps
    prompt_tokens: int  # counter: prompt tokens of accepted requests
    generated_tokens: int  # counter
    finished: dict[str, int]  # counter by finish reason
    rejected: int  # counter: refused with Overloaded
    step_seconds: float  # counter: time from submit to result, summed over steps
    stalled_s: float  # seconds since the last progress while there is work, else 0
