"""One rank of many: rank 0 takes steps from the executor and hands them on, the others follow.

Both wrap a worker of their own rank, which alone knows the model. A step's result is that of `Layout.result_rank`; a
rank whose step fails tells rank 0, which fails that step and all later ones with the name and the place of that rank.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pagedray.engine.config import Config, EngineFacts, FailureConfig
from pagedray.engine.errors import ConfigError, EngineDead, PagedrayError
from pagedray.engine.executor import RankWorker
from pagedray.engine.messages import RunnerOutput, SchedulerOutput, decode, encode
from pagedray.engine.metrics import ExpertCounts
from pagedray.engine.worker.control import KEPT_RESULTS, PATIENCE_S, Lead, Member, PeersLost
from pagedray.engine.worker.layout import Layout

if TYPE_CHECKING:
    import torch

    from pagedray.engine.worker.parallel import Parallel

log = logging.getLogger(__name__)

STUCK_S = 2.0  # for a rank to answer that its process runs, while a step takes too long
LAST_STEPS_S = 5.0  # for the steps in flight when a gang is closed
LOADS_S = 10.0  # for a stage to finish the steps it has, and tell what its experts got
LAST_WORDS_S = 1.0  # for rank 0's own error, which says more than another rank's report of the same

R = TypeVar("R")


def make_rank(
    worker_class: Callable[..., RankWorker], config: Config, meeting: Lead | Member, place: str, gpu: int | None = None
) -> LeadWorker | Follower:
    """This process's part in a gang.

    Args:
        worker_class: builds the worker from (config, rank, connect), see `engine.worker.worker.Worker`.
        place: where this process runs, for messages.
        gpu: which of the GPUs that this process sees is its own; None: it sees one alone.
    """
    layout = Layout(config.worker.tensor_parallel_size, config.worker.pipeline_parallel_size)
    worker = worker_class(config, meeting.rank, functools.partial(_connect, config, layout, meeting, gpu))
    if isinstance(meeting, Lead):
        name = f"rank 0 on {place}"
        stages = tuple(layout.tp_size * stage for stage in range(1, layout.pp_size))  # the first rank of each
        return LeadWorker(worker, meeting, layout.result_rank, name, config.failure, stages)
    return Follower(worker, meeting, meeting.rank == layout.result_rank, config.scheduler.run_ahead)


def _connect(config: Config, layout: Layout, meeting: Lead | Member, gpu: int | None, device: torch.device) -> Parallel:
    """Called in the thread that will compute steps."""
    import torch  # which a fake worker does without

    from pagedray.engine.worker.parallel import connect

    if device.type == "cuda" and gpu is not None:
        if gpu >= torch.cuda.device_count():
            raise ConfigError(
                f"tensor_parallel_size ({layout.tp_size}) x pipeline_parallel_size ({layout.pp_size}) is {layout.size} "
                f"ranks with a GPU each, this machine has {torch.cuda.device_count()}; lower one, or use device cpu"
            )
        torch.cuda.set_device(gpu)
    return connect(
        *(meeting, layout, device),
        expert_parallel=config.worker.enable_expert_parallel,
        meet_timeout_s=config.failure.start_timeout_s,
        step_timeout_s=config.failure.step_timeout_s,
    )


class LeadWorker:
    """Rank 0: an `executor.StepWorker` that stands for the whole gang.

    Args:
        worker: rank 0's own.
        result_rank: the rank that has the sampled tokens.
        name: of rank 0 and where it runs, for messages.
        failure: longest times of a start and of a step.
        other_stages: a rank of each pipeline stage but its own.
    """

    def __init__(
        self,
        worker: RankWorker,
        lead: Lead,
        result_rank: int,
        name: str,
        failure: FailureConfig,
        other_stages: tuple[int, ...] = (),
    ):
        self._other_stages = other_stages
        self._worker, self._lead, self._result_rank, self._name = worker, lead, result_rank, name
        self._start_timeout_s, self._step_timeout_s = failure.start_timeout_s, failure.step_timeout_s
        self._progress_s = 0.0
        self._gave_up = False  # on the start or a step, which may never end
        self._outcomes: dict[int, Future[RunnerOutput]] = {}  # of the last few steps, oldest first
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagedray-outcome")

    def load(self, on_phase: Callable[[str, float], None] = lambda name, seconds: None) -> EngineFacts:
        """Load rank 0's share, in lockstep with the others; done when all are.

        Raises:
            ConfigError: settings, checkpoint and machines don't go together.
            EngineDead: another rank died, or not all are ready within `start_timeout_s`.
        """
        deadline_s = time.monotonic() + self._start_timeout_s
        loading: Future[EngineFacts] = Future()

        def load() -> None:
            try:
                loading.set_result(self._worker.load(on_phase))
            except BaseException as error:
                loading.set_exception(error)

        threading.Thread(target=load, name="pagedray-load", daemon=True).start()  # it may hang where a rank is missing
        self._await_start(loading, deadline_s)
        if not loading.done():
            wait([loading], LAST_WORDS_S)
        facts = self._first_cause(loading)
        self._await_start(self._lead.all_ready, deadline_s)
        self._first_cause(self._lead.all_ready)
        return facts

    def _await_start(self, future: Future[Any], deadline_s: float) -> None:
        """Until it is done or a rank has failed. Raises: EngineDead at the deadline."""
        done, _ = wait([future, self._lead.failure], max(0.0, deadline_s - time.monotonic()), FIRST_COMPLETED)
        if not done:
            self._gave_up = True
            who = ", ".join(self._silent()) or "all ranks answer, but some still load"
            raise EngineDead(f"the ranks are not ready within start_timeout_s ({self._start_timeout_s:g} s): {who}")

    def submit(self, out: SchedulerOutput) -> None:
        """Queue a step on every rank; returns before it is computed. A step that was submitted before is ignored."""
        last = max(self._outcomes, default=None)
        if last is not None and out.step <= last:
            return
        self._lead.plan(out.step, encode(out))  # first, so that all begin together
        self._worker.submit(out)
        self._outcomes[out.step] = self._waiter.submit(self._outcome, out.step)
        self._outcomes.pop(out.step - KEPT_RESULTS, None)

    def result(self, step: int) -> RunnerOutput:
        """Wait for a step; it may be one of the last few again.

        Raises:
            EngineDead: a rank died, failed, or takes too long; names it and where it runs.
        """
        if step not in self._outcomes:
            raise LookupError(f"step {step} is not among those kept: {list(self._outcomes)}")
        outcome, asked_s = self._outcomes[step], time.monotonic()
        either: list[Future[Any]] = [outcome, self._lead.failure]
        while not outcome.done() and not self._lead.failure.done():
            left_s = max(asked_s, self._progress_s) + self._step_timeout_s - time.monotonic()
            if left_s <= 0:
                self._gave_up = True
                raise EngineDead(self._why_late(step))
            wait(either, left_s, FIRST_COMPLETED)
        return self._first_cause(outcome)

    def expert_loads(self) -> ExpertCounts:
        """Of all stages, in the steps submitted so far; all ranks of a stage count alike.

        Raises:
            EngineDead: a stage does not answer.
        """
        loads = self._worker.expert_loads()
        for data in self._lead.expert_loads(self._other_stages, LOADS_S) if self._other_stages else ():
            loads |= msgspec.msgpack.decode(data, type=ExpertCounts)
        return loads

    def close(self) -> None:
        """Finish the step that runs, drop those that wait, let the other ranks end. Safe to call twice."""
        if self._gave_up or self._lead.failure.done():
            self._worker.abort()
        self._worker.close()
        wait(list(self._outcomes.values()), LAST_STEPS_S)  # on a GPU they need the other ranks, who leave once told
        self._lead.close()
        self._worker.abort()  # what still waits, waits for ranks that are gone
        self._waiter.shutdown(wait=True, cancel_futures=True)

    def _outcome(self, step: int) -> RunnerOutput:
        own = self._worker.result(step)
        out = own if self._result_rank == 0 else decode(RunnerOutput, self._lead.result(step).result())
        self._progress_s = time.monotonic()
        return out

    def _why_late(self, step: int) -> str:
        who = ", ".join(self._silent()) or "all ranks answer, but don't finish it"
        return f"step {step} takes longer than step_timeout_s ({self._step_timeout_s:g} s): {who}"

    def _silent(self) -> list[str]:
        return [f"{name} does not answer" for name in self._lead.silent_ranks(STUCK_S)]

    def _first_cause(self, future: Future[R]) -> R:
        """What rank 0 has, unless another rank's failure is why it has nothing."""
        failure = self._lead.failure
        if not future.done():
            failure.result()
        try:
            return future.result()
        except CancelledError:
            raise EngineDead("the worker was closed") from None
        except PeersLost as error:
            wait([failure], PATIENCE_S + LAST_WORDS_S)
            if failure.done():
                failure.result()
            raise EngineDead("; ".join([str(error), *self._silent()])) from error
        except PagedrayError:
            raise
        except Exception as error:
            raise EngineDead(f"{self._name}: {type(error).__name__}: {error}") from error


class Follower:
    """A rank above 0: `load`, then `follow` for the rest of its life.

    Args:
        worker: this rank's own.
        sends_results: whether its results are the gang's.
        run_ahead: most steps in flight.
    """

    def __init__(self, worker: RankWorker, member: Member, sends_results: bool, run_ahead: int):
        self._worker, self._member, self._sends_results = worker, member, sends_results
        self._run_ahead = run_ahead
        self._failure: Exception | None = None
        self._reporter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagedray-report")
        self._counter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagedray-loads")

    def load(self, on_phase: Callable[[str, float], None] = lambda name, seconds: None) -> EngineFacts:
        """Load this rank's share, in lockstep with the others."""
        try:
            facts = self._worker.load(on_phase)
            self._member.send_ready()
            return facts
        except Exception as error:
            self._member.send_failure(error)
            raise

    def follow(self) -> None:
        """Compute the steps that rank 0 hands on.

        Raises:
            EngineDead: rank 0 is gone.
            Exception: whatever a step failed with.
        """
        reports: deque[Future[None]] = deque()
        try:
            for data in self._member.plans(self._asked):
                out = decode(SchedulerOutput, data)
                if len(reports) > self._run_ahead:  # only its thread is late, and a worker keeps results for a while
                    reports.popleft().result()
                self._worker.submit(out)
                reports.append(self._reporter.submit(self._report, out.step))
        except Exception as error:
            self._fail(error)
        finally:
            self._worker.abort()
            for thread in (self._reporter, self._counter):
                thread.shutdown(wait=False, cancel_futures=True)
        if self._failure is not None:
            raise self._failure

    def _report(self, step: int) -> None:
        try:
            out = self._worker.result(step)
            if self._sends_results:
                self._member.send_result(step, encode(out))
        except Exception as error:
            self._fail(error)

    def _asked(self) -> None:
        """In a thread of its own: it waits for the steps that are queued, and neither plans nor results wait for it."""
        self._counter.submit(self._report_loads)

    def _report_loads(self) -> None:
        try:
            self._member.send_loads(msgspec.msgpack.encode(self._worker.expert_loads()))
        except Exception as error:  # what is wrong here fails a step, too, whose error says more
            log.info("expert loads can't be told: %s", error)

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            self._member.send_failure(error)
            self._member.stop()
