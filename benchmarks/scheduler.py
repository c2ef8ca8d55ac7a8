"""Python time of schedule + commit for a step of 256 decoding sequences, over whole block lengths: blocks run full,
are hashed and registered, and new ones are taken, as in a real load. CPU time of the thread, so that other processes
disturb it less.

The baseline only builds the messages of such a step: what any scheduler that sends them pays at least.

    python -m benchmarks.scheduler
"""

from __future__ import annotations

import statistics
import time

from benchmarks.report import header, row
from pagedray.engine.messages import Request, RequestUpdate, RunnerOutput, SamplingParams, ScheduledSeq, SchedulerOutput
from pagedray.engine.scheduler import Scheduler, SchedulerLimits

NUM_SEQS = 256
BLOCK_SIZE = 16
PROMPT_LEN = 100
STEPS_PER_ROUND = 4 * BLOCK_SIZE
ROUNDS = 7
BUDGET_S = 0.25e-3


def decoding_scheduler(run_ahead: int) -> tuple[Scheduler, list[SchedulerOutput]]:
    """A scheduler whose sequences all decode, at different offsets in their blocks, and its steps in flight."""
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=NUM_SEQS,
            max_tokens_per_step=2**20,
            max_model_len=2**20,
            prefill_chunk_tokens=None,
            max_queued_requests=NUM_SEQS,
            max_queued_tokens=2**20,
        ),
        block_size=BLOCK_SIZE,
        num_blocks=NUM_SEQS * 100,
        windows=(None,),
        eos_ids=(0,),
    )
    for i in range(NUM_SEQS):
        prompt = tuple(range(i + 1, i + 1 + PROMPT_LEN + i % BLOCK_SIZE))
        params = SamplingParams(max_tokens=4096, seed=i)
        scheduler.add((Request(id=f"chatcmpl-{i:032x}-0", client_id="c", prompt_ids=prompt, params=params),), 0.0)
    in_flight = []
    for _ in range(run_ahead):
        out = scheduler.schedule(0.0)
        assert out is not None and len(out.scheduled) == NUM_SEQS
        in_flight.append(out)
    return scheduler, in_flight


def scheduler_round(scheduler: Scheduler, in_flight: list[SchedulerOutput], tokens: tuple[int, ...]) -> float:
    """Seconds per step of commit + schedule."""
    total = 0.0
    for _ in range(STEPS_PER_ROUND):
        result = RunnerOutput(in_flight.pop(0).step, tokens)
        start = time.thread_time()
        updates = scheduler.commit(result, 0.0)
        out = scheduler.schedule(0.0)
        total += time.thread_time() - start
        assert out is not None and len(out.scheduled) == len(updates) == NUM_SEQS
        in_flight.append(out)
    return total / STEPS_PER_ROUND


def message_round(ids: list[str], tokens: tuple[int, ...]) -> float:
    """Seconds per step of building one ScheduledSeq and one RequestUpdate for each sequence."""
    no_blocks, total = ((),), 0.0
    for step in range(STEPS_PER_ROUND):
        start = time.thread_time()
        updates = [RequestUpdate(name, step, (token,)) for name, token in zip(ids, tokens, strict=True)]
        out = SchedulerOutput(
            step, (), tuple([ScheduledSeq(name, i, step, 1, True, no_blocks) for i, name in enumerate(ids)]), ()
        )
        total += time.thread_time() - start
        assert len(updates) == len(out.scheduled) == NUM_SEQS
    return total / STEPS_PER_ROUND


def main() -> None:
    header()
    for run_ahead in (1, 2):
        scheduler, in_flight = decoding_scheduler(run_ahead)
        ids, tokens = [seq.id for seq in scheduler.running], tuple(range(1, NUM_SEQS + 1))
        ours, baseline = [], []
        for index in range(ROUNDS + 1):  # the first warms up; ours and the baseline alternate
            times = scheduler_round(scheduler, in_flight, tokens), message_round(ids, tokens)
            if index:
                ours.append(times[0])
                baseline.append(times[1])
        scheduler.check_invariants()
        median = statistics.median(ours)
        row(
            "schedule + commit",
            f"{NUM_SEQS} decoding, run-ahead {run_ahead}",
            median * 1e6,
            statistics.median(baseline) * 1e6,
            "messages alone",
            unit="us",
            spread=(max(ours) - min(ours)) / median,
            correct=f"{'within' if median <= BUDGET_S else 'OVER'} the budget of {BUDGET_S * 1e6:.0f} us",
        )


if __name__ == "__main__":
    main()
