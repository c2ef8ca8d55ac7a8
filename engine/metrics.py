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


ExpertCounts = dict[int, tuple[int, ...]]  # layer → tokens that each expert got; the layers that have experts


class LayerLoad(msgspec.Struct, frozen=True):
    """Tokens that the experts of a layer got."""

    layer: int
    most: int  # counter: of the one that got most
    mean: float  # counter: of all


class ExpertLoads(msgspec.Struct, frozen=True):
    """How evenly a model's router fills its experts: some numbers for each layer, and one for each expert."""

    layers: tuple[LayerLoad, ...]
    experts: tuple[int, ...]  # counter: tokens that expert i of any layer got

    @classmethod
    def of(cls, counts: ExpertCounts) -> ExpertLoads:
        layers = [LayerLoad(layer, max(got), sum(got) / len(got)) for layer, got in sorted(counts.items())]
        return cls(tuple(layers), tuple(map(sum, zip(*counts.values(), strict=True))))


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
    experts: ExpertLoads | None = None  # as they were some seconds ago; None: no experts, or not asked
