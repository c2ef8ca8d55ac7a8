"""What a step costs the scheduler's process with 1, 2, 4 and 8 ranks: real gangs on Ray, whose workers compute nothing.

The scheduler calls rank 0 alone, which hands the plan to the others, so the cost should not grow with their number. CPU
time of the whole process that submits steps of 256 decoding sequences and takes their results, Ray's threads
included; of rank 0's process beside it, and the time from one result to the next. All gangs stand at the same time and
take turns.

    python -m benchmarks.fanout
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import header, median_and_spread, row
from benchmarks.scheduler import NUM_SEQS, decoding_scheduler
from pagedray.engine.config import Config, EngineFacts, ModelConfig, load_config
from pagedray.engine.messages import RunnerOutput, SchedulerOutput

IN_FLIGHT = 2
GOAL = 0.9  # of one rank's cost over that of several
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class IdleWorker:
    """A rank whose steps take no time and give each sequence a token."""

    def __init__(self, config: Config, rank: int = 0, connect: Callable[[Any], Any] | None = None):
        self._tokens = tuple(range(1, NUM_SEQS + 1))

    def load(self, on_phase: Callable[[str, float], None] = lambda name, seconds: None) -> EngineFacts:
        return EngineFacts(
            model_names=("idle",),
            vocab_size=NUM_SEQS + 1,
            max_model_len=2,
            block_size=16,
            num_blocks=2,
            block_groups=(None,),
            kv_capacity_tokens=32,
            eos_ids=(),
            enable_prefix_caching=False,
            dtype="float32",
            device="cpu",
            attention_backend="none",
            attention_backend_reason="nothing is computed",
        )

    def submit(self, out: SchedulerOutput) -> None:
        pass

    def result(self, step: int) -> RunnerOutput:
        return RunnerOutput(step, self._tokens)

    def expert_loads(self) -> dict[int, tuple[int, ...]]:
        return {}

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Costs:
    """Microseconds per step, one figure a round."""

    scheduler: list[float] = dataclasses.field(default_factory=list)
    rank0: list[float] = dataclasses.field(default_factory=list)
    period: list[float] = dataclasses.field(default_factory=list)


class Bench:
    """One gang, and the steps that it is given."""

    def __init__(self, num_ranks: int):
        import ray
        from ray.util.placement_group import placement_group

        from pagedray.deployments.build import bundles, strategy
        from pagedray.deployments.directory import Directory
        from pagedray.deployments.gang import Gang, RayExecutor

        config = load_config({"tensor_parallel_size": num_ranks})
        self.num_ranks, self.costs = num_ranks, Costs()
        placement = placement_group(bundles(config), strategy(config))
        ray.get(placement.ready())
        directory = Directory(f"fanout-{num_ranks}", ModelConfig())
        self._gang = Gang(config, placement, directory, "bench", "benchmarks.fanout:IdleWorker")
        self._executor = RayExecutor(self._gang.ranks[0].handle, 60.0)
        scheduler, in_flight = decoding_scheduler(1)
        self._plan, self._scheduler = in_flight[0], scheduler
        self._step = 0

    async def start(self) -> None:
        await asyncio.gather(*(rank.attach("") for rank in self._gang.ranks))
        await self._gang.load()

    async def run(self, num_steps: int) -> None:
        """One round."""
        assert self._gang.ranks[0].place is not None
        pid = self._gang.ranks[0].place.pid
        began_s, cpu_s, rank0_s = time.perf_counter(), time.process_time(), cpu_of(pid)
        for index in range(num_steps + IN_FLIGHT - 1):
            if index < num_steps:
                self._executor.submit(SchedulerOutput(self._step + index, (), self._plan.scheduled, ()))
            if index >= IN_FLIGHT - 1:
                out = await self._executor.result()
                assert out.step == self._step + index - IN_FLIGHT + 1 and len(out.token_ids) == NUM_SEQS
        self._step += num_steps
        costs = self.costs
        costs.scheduler.append(1e6 * (time.process_time() - cpu_s) / num_steps)
        costs.period.append(1e6 * (time.perf_counter() - began_s) / num_steps)
        costs.rank0.append(1e6 * (cpu_of(pid) - rank0_s) / num_steps)


def cpu_of(pid: int) -> float:
    """Seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


async def measure(sizes: list[int], num_steps: int, rounds: int) -> list[Bench]:
    benches = [Bench(size) for size in sizes]
    for bench in benches:
        await bench.start()
    for index in range(rounds + 1):
        for bench in benches:
            await bench.run(num_steps)
            if index == 0:
                bench.costs = Costs()
    return benches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp") as folder:
        os.environ.update(RAY_AUTH_MODE="disabled", RAY_TMPDIR=folder)  # Ray reads them when it is imported
        import ray

        ray.init(
            address="local",
            num_cpus=sum(args.ranks) + len(args.ranks),
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
        )
        try:
            benches = asyncio.run(measure(args.ranks, args.steps, args.rounds))
        finally:
            ray.shutdown()
    header()
    base = median_and_spread(benches[0].costs.scheduler)[0]
    for index, bench in enumerate(benches):
        median, spread = median_and_spread(bench.costs.scheduler)
        row(
            "step fan-out, CPU",
            f"{bench.num_ranks} rank{'s' * (bench.num_ranks > 1)}, {NUM_SEQS} sequences",
            median,
            base if index else None,
            f"{args.ranks[0]} rank",
            unit="us",
            goal=GOAL if index else None,
            spread=spread,
            details={
                "rank0_cpu_us": round(median_and_spread(bench.costs.rank0)[0], 1),
                "period_us": round(median_and_spread(bench.costs.period)[0], 1),
                "cores": os.cpu_count(),
            },
        )


if __name__ == "__main__":
    main()
