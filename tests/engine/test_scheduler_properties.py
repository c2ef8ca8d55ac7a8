"""Random loads over tiny pools: every invariant after every call, and the tokens of a solo run for every request."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pagedray.engine.errors import Overloaded, UserError
from pagedray.engine.messages import Request, RequestUpdate, RunnerOutput, SamplingParams, encode
from pagedray.engine.prefix_cache import hash_blocks
from pagedray.engine.scheduler import Scheduler, SchedulerLimits
from tests.engine.simulated_worker import EOS_ID, SimulatedWorker, digests, logprob_of, solo

MAX_MODEL_LEN = 60
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)


class Ledger:
    """What the client of one request has received."""

    def __init__(self, request: Request):
        self.request = request
        self.token_ids = list(request.output_ids)
        self.logprobs: list = []
        self.prompt_logprobs: list = []
        self.finish_reason: str | None = None

    def take(self, update: RequestUpdate) -> None:
        assert self.finish_reason is None, "an update after the end"
        assert update.first == len(self.token_ids), "a token is lost or repeated"
        assert update.token_ids or update.finish_reason or update.prompt_logprobs, "an empty update"
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        for found in update.prompt_logprobs:
            assert found.start == 1 + len(self.prompt_logprobs), "a prompt logprob is lost or repeated"
            self.prompt_logprobs += found.entries
        assert (update.stop_id is not None) == (update.finish_reason == "stop")
        assert update.stop_id is None or update.stop_id == self.token_ids[-1]
        self.finish_reason = update.finish_reason

    def check(self) -> None:
        request = self.request
        expected, reason = solo(request, MAX_MODEL_LEN)
        got = tuple(self.token_ids)
        if self.finish_reason == "abort":
            assert got == expected[: len(got)] and (not expected or len(got) < len(expected))
        else:
            assert (got, self.finish_reason) == (expected, reason)
        ids = [*request.prompt_ids, *got]
        histories = digests(ids, request.cache_salt)
        wanted = [logprob_of(ids[i], histories[i - 1]) for i in range(1, len(ids))]
        num_prompt, resumed = len(request.prompt_ids), len(request.prompt_ids) + len(request.output_ids)
        if request.params.logprobs is not None:
            assert self.logprobs == wanted[resumed - 1 :]
        if request.params.prompt_logprobs is not None and len(got) > len(request.output_ids):
            assert self.prompt_logprobs == wanted[: num_prompt - 1]


class Simulation:
    """A scheduler, a simulated worker, and steps in flight between them."""

    def __init__(self, rng: random.Random, *, run_ahead: int, num_requests: int):
        self.rng, self.run_ahead, self.num_to_come = rng, run_ahead, num_requests
        block_size = rng.choice((1, 2, 2, 3, 4, 8))
        windows = rng.choice(((None,), (None, 5), (None, 1, 9), (2,), (None, None, 6), (2, 7)))
        chunk = rng.choice((None, 1, 2, 5, 16))
        tight = rng.random() < 0.4  # many short prompts and long outputs in a pool for one or two of them
        num_seqs, max_tokens = (12, 40) if tight else rng.choice(((1, 4), (5, 3), (5, 9), (12, 64)))
        num_blocks = len(windows) * (rng.choice((60, 80) if tight else (14, 60, 120)) // block_size + 2)
        self.caching = rng.random() < 0.75
        self.arrival_rate = 0.8 if tight else rng.choice((0.1, 0.8))
        self.longest_output = 50 if tight else rng.choice((8, 50))
        self.now = 0.0
        self.salts: dict[str, str] = {}
        self.ledgers: dict[str, Ledger] = {}
        self.in_flight: deque[RunnerOutput] = deque()
        self.plans = hashlib.blake2b()
        self.num_refused = 0
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=num_seqs,
                max_tokens_per_step=max_tokens,
                max_model_len=MAX_MODEL_LEN,
                prefill_chunk_tokens=chunk,
                max_queued_requests=40 if tight else rng.choice((5, 40)),
                max_queued_tokens=400,
                num_turns=rng.choice((1, 1, 2, 3)),
            ),
            block_size=block_size,
            num_blocks=num_blocks,
            windows=windows,
            eos_ids=(EOS_ID,),
            policy=rng.choice(("fcfs", "priority")),
            enable_prefix_caching=self.caching,
        )
        self.worker = SimulatedWorker(
            block_size=block_size,
            num_blocks=num_blocks,
            windows=windows,
            num_rows=num_seqs,
            max_tokens=max_tokens,
            max_chunk=min(chunk or max_tokens, max_tokens),
            salts=self.salts,
        )
        self.block_size = block_size
        self.prefixes = [
            [rng.randrange(1, 50) for _ in range(rng.randint(1, longest))]
            for longest in ((2, 5) if tight else (3, 12, 25))
        ]

    def run(self) -> None:
        """Until everything has ended; requests come, go and expire meanwhile."""
        while self.num_to_come or self.scheduler.has_work():
            if self.num_to_come and self.rng.random() < self.arrival_rate:
                self._arrive()
            if self.rng.random() < 0.05:
                self._cancel()
            self.now += self.rng.random()
            if len(self.in_flight) < self.run_ahead and self.rng.random() < 0.8:
                self._plan()
            if self.in_flight and (len(self.in_flight) == self.run_ahead or self.rng.random() < 0.5):
                self._take(self.scheduler.commit(self.in_flight.popleft(), self.now))
        self._take(self.scheduler.take_updates())
        stats = self.scheduler.stats()
        assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
        for ledger in self.ledgers.values():
            ledger.check()

    def _plan(self) -> None:
        idle, waiting = not self.in_flight, self.scheduler.num_waiting
        out = self.scheduler.schedule(self.now)
        ended = self.scheduler.take_updates()
        self._take(ended)
        if out is None:
            assert not idle or not self.scheduler.has_work(), "work, nothing in flight, and no step"
            return
        if idle and waiting and not self.scheduler.num_running:
            assert out.added or ended, "the queue does not advance"
        self.plans.update(encode(out))
        self.in_flight.append(self.worker.run(out))

    def _arrive(self) -> None:
        rng, number = self.rng, self.num_to_come
        self.num_to_come -= 1
        prompt = [*rng.choice(self.prefixes), *(rng.randrange(1, 50) for _ in range(rng.randint(0, 8)))]
        prompt = tuple(prompt[rng.randint(0, len(prompt) // 2) if rng.random() < 0.2 else 0 :])
        salt = rng.choice(("", "", "salt"))
        params = SamplingParams(
            max_tokens=rng.randint(1, self.longest_output),
            seed=rng.choice((1, 2, number)),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice(((), (), (7, 8))),
            logprobs=rng.choice((None, None, 0)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )
        request = Request(
            id=f"r{number}",
            client_id="c",
            prompt_ids=prompt,
            params=params,
            block_hashes=hash_blocks(prompt, self.block_size, salt) if rng.random() < 0.7 else (),
            cache_salt=salt,
            priority=rng.randint(-1, 1),
            deadline_s=self.now + rng.random() * 60 if rng.random() < 0.1 else None,
        )
        if rng.random() < 0.2:  # resubmitted after a failure, with some of its tokens
            tokens, _ = solo(request, MAX_MODEL_LEN)
            outputs = tokens[: rng.randint(0, len(tokens) - 1)]
            request = Request(
                **{name: getattr(request, name) for name in request.__struct_fields__} | {"output_ids": outputs}
            )
        requests = [request]
        if rng.random() < 0.2:
            fields = {name: getattr(request, name) for name in request.__struct_fields__}
            requests.append(Request(**fields | {"id": f"r{number}-1"}))
        self.salts.update({r.id: salt for r in requests})
        before = self.scheduler.num_waiting
        try:
            self.scheduler.add(tuple(requests), self.now)
        except (UserError, Overloaded):
            self.num_refused += 1
            assert self.scheduler.num_waiting == before
        else:
            self.ledgers.update({r.id: Ledger(r) for r in requests})
        self.scheduler.check_invariants()

    def _cancel(self) -> None:
        alive = [key for key, ledger in self.ledgers.items() if ledger.finish_reason is None]
        if alive and (update := self.scheduler.abort(self.rng.choice(alive), "test")) is not None:
            self._take([update])

    def _take(self, updates: list[RequestUpdate]) -> None:
        self.scheduler.check_invariants()
        for update in updates:
            self.ledgers[update.request_id].take(update)


@pytest.mark.parametrize("run_ahead", (1, 2, 3, 4))
def test_random_loads_give_the_tokens_of_solo_runs(run_ahead: int):
    steps = preemptions = hits = refused = 0
    for seed in range(32):
        simulation = Simulation(random.Random(1000 * run_ahead + seed), run_ahead=run_ahead, num_requests=40)
        simulation.run()
        stats = simulation.scheduler.stats()
        steps += simulation.worker.num_steps
        preemptions += stats.num_preemptions
        hits += stats.prefix_hit_tokens
        refused += simulation.num_refused
    assert steps > 2500 and preemptions > 75 and hits > 400 and refused > 50, "the loads exercise too little"


@SETTINGS
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 12))
def test_small_loads_found_by_search(rng: random.Random, run_ahead: int, num_requests: int):
    simulation = Simulation(rng, run_ahead=run_ahead, num_requests=num_requests)
    simulation.run()
    event(f"preempted: {simulation.scheduler.stats().num_preemptions > 0}")


def test_the_same_inputs_give_the_same_plans_in_every_process():
    code = """
import random
from tests.engine.test_scheduler_properties import Simulation
simulation = Simulation(random.Random(2), run_ahead=2, num_requests=40)
simulation.run()
print(simulation.plans.hexdigest(), simulation.scheduler.stats().num_preemptions > 0)
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
        ).stdout.decode()
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and outputs.pop().endswith("True\n")
