"""Drives a scheduler and a real worker step by step, without engine loop, clock or Ray."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from pagedray.engine.config import Config, load_config
from pagedray.engine.executor import StepWorker
from pagedray.engine.messages import Request, SamplingParams, TokenLogprobs
from pagedray.engine.scheduler import Scheduler, SchedulerLimits
from pagedray.engine.worker.worker import Worker


@dataclasses.dataclass
class Output:
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)


class StepLoop:
    """A loaded model that completes prompts. `settings` are fields of the configuration tree."""

    def __init__(self, model: str, make_worker: Callable[[Config], StepWorker] = Worker, **settings: object):
        threads = {"cpu_threads": 1, "device": "cpu", "dtype": "float32"}
        self.config: Config = load_config(overrides={"model": model, **threads, **settings})
        self.worker = make_worker(self.config)
        self.facts = self.worker.load()
        sched, cache = self.config.scheduler, self.config.cache
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=sched.max_num_seqs,
                max_tokens_per_step=sched.max_num_batched_tokens,
                max_model_len=self.facts.max_model_len,
                prefill_chunk_tokens=sched.prefill_chunk_tokens,
                max_queued_requests=sched.max_queued_requests,
                max_queued_tokens=sched.max_queued_tokens,
            ),
            block_size=self.facts.block_size,
            num_blocks=self.facts.num_blocks,
            windows=self.facts.block_groups,
            eos_ids=self.facts.eos_ids,
            enable_prefix_caching=cache.enable_prefix_caching,
        )

    def __enter__(self) -> StepLoop:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.worker.close()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **params: object) -> list[Output]:
        """Complete all prompts together; greedy and past EOS unless `params` say otherwise."""
        params = {"temperature": 0.0, "ignore_eos": True, "seed": 0, **params}
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        outputs = {str(i): Output() for i in range(len(prompts))}
        requests = (
            Request(id=str(i), client_id="test", prompt_ids=tuple(ids), params=sampling)
            for i, ids in enumerate(prompts)
        )
        self.scheduler.add(tuple(requests), now_s=0.0)
        in_flight: deque[int] = deque()
        while self.scheduler.has_work():
            while len(in_flight) < self.config.scheduler.run_ahead and (plan := self.scheduler.schedule(now_s=0.0)):
                self.worker.submit(plan)
                in_flight.append(plan.step)
            assert in_flight, "the scheduler has work and plans none"
            updates = self.scheduler.commit(self.worker.result(in_flight.popleft()), now_s=0.0)
            for update in updates + self.scheduler.take_updates():
                output = outputs[update.request_id]
                assert update.first == len(output.token_ids) and update.error is None
                output.token_ids += update.token_ids
                output.logprobs += update.logprobs
                for part in update.prompt_logprobs:
                    assert part.start == len(output.prompt_logprobs) + 1
                    output.prompt_logprobs += part.entries
                output.finish_reason = update.finish_reason
                output.num_cached_tokens = update.num_cached_tokens
        self.scheduler.check_invariants()
        assert self.scheduler.stats().num_used_blocks == 0
        return list(outputs.values())
