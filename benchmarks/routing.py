"""Routing in a simulation: the router of an ingress over 1, 8 and 64 engines, 10^5 requests, against round robin.

Traffic, the same for both: prompts with shared beginnings, one of which is hot, with 4 times the requests that one
engine can serve (a quarter of all where there is one engine); halfway 500 requests that share nothing come at once.
An engine serves so many requests at a time. A prompt block that its cache lacks takes a hundredth of the time of an
answer. What happens in an engine reaches the router late, as answers to polls do.

    python -m benchmarks.routing
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Iterator

import msgspec

from benchmarks.report import header, row
from pagedray.engine.cache_log import CacheLog, snapshot
from pagedray.engine.messages import EngineNews, Request, SamplingParams
from pagedray.engine.prefix_cache import DIGEST_BYTES
from pagedray.serving.router import RoutedEngine, Router

NUM_REQUESTS = 100_000
NUM_ENGINES = (1, 8, 64)
BURST = 500
END_OF_BURST = NUM_REQUESTS // 2 + BURST - 1  # number of its last request
SEED = 1
BLOCK_SIZE = 16
SHARED_BLOCKS = (16, 48)  # of a shared beginning
OWN_BLOCKS = 8  # of a request alone
BEGINNINGS = 60  # shared ones, per engine
CACHE_BLOCKS = 1_280  # of an engine: those of 40 beginnings
SLOTS = 32  # requests that an engine serves at a time
ANSWER_S = 1.0  # once the prompt is computed
BLOCK_S = 0.01  # a prompt block that is not cached
CAPACITY = SLOTS / (ANSWER_S + OWN_BLOCKS * BLOCK_S)  # requests a second of an engine that finds every beginning
UTILIZATION = 0.7  # of all engines together, were every beginning found
NEWS_S = 0.05  # from a change in an engine to the router that hears of it
FACTOR = 2.0  # bound on imbalance
BUDGET_US = 100.0

Hashes = tuple[bytes, ...]


def traffic(num_engines: int) -> Iterator[tuple[float, Hashes]]:
    """Seconds of arrival and block hashes of each request."""
    rng = random.Random(SEED)

    def hashes(num: int) -> Hashes:
        data = rng.randbytes(num * DIGEST_BYTES)
        return tuple([data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)])

    beginnings = [hashes(rng.randint(*SHARED_BLOCKS)) for _ in range(BEGINNINGS * num_engines)]
    rate = UTILIZATION * CAPACITY * num_engines
    hot_share = 4 * CAPACITY / rate if num_engines > 1 else 0.25
    now_s = 0.0
    for number in range(NUM_REQUESTS - BURST):
        if number == NUM_REQUESTS // 2:
            for _ in range(BURST):
                yield now_s, hashes(40)
        now_s += rng.expovariate(rate)
        yield now_s, (beginnings[0] if rng.random() < hot_share else rng.choice(beginnings)) + hashes(OWN_BLOCKS)


class Cache:
    """An engine's prefix cache: least recently used blocks go first, and a log tells of both."""

    def __init__(self) -> None:
        self.num_found = self.num_asked = 0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._log = CacheLog()
        self._told: int | None = None

    def compute(self, hashes: Hashes) -> int:
        """Have the blocks of a prompt; how many were not there."""
        blocks = self._blocks
        found = next((i for i, block_hash in enumerate(hashes) if block_hash not in blocks), len(hashes))
        for block_hash in reversed(hashes):  # the first ones go last
            if block_hash in blocks:
                blocks.move_to_end(block_hash)
            else:
                blocks[block_hash] = None
                self._log.added(block_hash)
        while len(blocks) > CACHE_BLOCKS:
            self._log.evicted(blocks.popitem(last=False)[0])
        self.num_found += found
        self.num_asked += len(hashes)
        return len(hashes) - found

    def news(self, num_running: int, num_waiting: int) -> EngineNews:
        changes = None if self._told is None else self._log.since(self._told)
        self._told = self._log.end
        return EngineNews(
            is_draining=False,
            other_requests=0,
            other_tokens=0,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_usage=0.0,
            cache=snapshot(self._blocks) if changes is None else changes,
        )


class Engine:
    def __init__(self) -> None:
        self.cache = Cache()
        self.num_running = 0
        self.waiting: deque[tuple[float, Request]] = deque()  # since when
        self.has_news = False


class Result(msgspec.Struct):
    found_percent: float  # prompt blocks that were cached where the request went
    answer_s: float  # mean from arrival to end
    max_over_min: float  # of the requests in flight per engine: mean over samples
    burst_max_over_min: float  # of the same, once the burst is there
    decision_us: float  # mean
    decision_p99_us: float
    keeps_bound: bool  # affinity never went beyond it


class Simulation:
    """
    Args:
        policy: of the router.
    """

    def __init__(self, policy: str, num_engines: int):
        self._router = Router(policy, FACTOR)
        self._engines = {self._router.add(f"engine-{i}"): Engine() for i in range(num_engines)}
        self._traffic = traffic(num_engines)
        self._ends: list[tuple[float, int, RoutedEngine, Request, float]] = []  # a heap: end, number, …, arrival
        self._tells: deque[tuple[float, RoutedEngine]] = deque()  # in order: all news travels equally long
        self._numbers = itertools.count()
        self._answers_s: list[float] = []

    def run(self) -> Result:
        routed, took = list(self._engines), []
        ratios, burst_ratio, keeps_bound = [], 0.0, True
        params = SamplingParams(max_tokens=1, seed=0)
        for number, (now_s, hashes) in enumerate(self._traffic):
            self._advance(now_s)
            ids = (0,) * (BLOCK_SIZE * len(hashes))
            request = Request(id="", client_id="", prompt_ids=ids, params=params, block_hashes=hashes)
            least = min(engine.load for engine in routed)
            by_affinity = self._router.decisions["prefix", "affinity"]
            start = time.perf_counter()
            chosen = self._router.choose(routed, (request,), None)
            took.append(time.perf_counter() - start)
            self._router.sent(chosen, request)
            if self._router.decisions["prefix", "affinity"] > by_affinity:
                cost = 1 + len(ids) / 1024
                keeps_bound &= chosen.load <= FACTOR * (least + cost) + 1e-6
            engine = self._engines[chosen]
            engine.waiting.append((now_s, request))
            if engine.num_running < SLOTS:
                self._begin(chosen, now_s)
            if number % 50 == 0 or number == END_OF_BURST:
                counts = [engine.own_requests for engine in routed]
                ratios.append(max(counts) / max(1, min(counts)))
                burst_ratio = ratios[-1] if number == END_OF_BURST else burst_ratio
        self._advance(float("inf"))
        caches = [engine.cache for engine in self._engines.values()]
        assert len(self._answers_s) == len(took) == NUM_REQUESTS and not any(engine.load > 1e-6 for engine in routed)
        return Result(
            found_percent=100 * sum(c.num_found for c in caches) / sum(c.num_asked for c in caches),
            answer_s=statistics.fmean(self._answers_s),
            max_over_min=statistics.fmean(ratios),
            burst_max_over_min=burst_ratio,
            decision_us=1e6 * statistics.fmean(took),
            decision_p99_us=1e6 * sorted(took)[len(took) * 99 // 100],
            keeps_bound=keeps_bound,
        )

    def _begin(self, routed: RoutedEngine, now_s: float) -> None:
        """Serve the request that waits longest."""
        engine = self._engines[routed]
        since_s, request = engine.waiting.popleft()
        engine.num_running += 1
        end_s = now_s + ANSWER_S + BLOCK_S * engine.cache.compute(request.block_hashes)
        heapq.heappush(self._ends, (end_s, next(self._numbers), routed, request, since_s))
        if not engine.has_news:
            engine.has_news = True
            self._tells.append((now_s + NEWS_S, routed))

    def _advance(self, now_s: float) -> None:
        """Let everything happen that happens until then."""
        while True:
            tell_s = self._tells[0][0] if self._tells else float("inf")
            end_s = self._ends[0][0] if self._ends else float("inf")
            if (first_s := min(tell_s, end_s)) > now_s or first_s == float("inf"):
                return
            if tell_s < end_s:
                _, routed = self._tells.popleft()
                engine = self._engines[routed]
                engine.has_news = False
                self._router.hear(routed, engine.cache.news(engine.num_running, len(engine.waiting)))
            else:
                _, _, routed, request, since_s = heapq.heappop(self._ends)
                self._router.ended(routed, request)
                self._answers_s.append(end_s - since_s)
                engine = self._engines[routed]
                engine.num_running -= 1
                if engine.waiting:
                    self._begin(routed, end_s)


FIGURES = (  # of the table: what it is, its field in Result, unit
    ("blocks found", "found_percent", "%"),
    ("arrival to end", "answer_s", "s"),
    ("max/min load", "max_over_min", ""),
    ("load after burst", "burst_max_over_min", ""),
    ("one decision", "decision_us", "us"),
)


def main() -> None:
    header()
    for num_engines in NUM_ENGINES:
        ours, baseline = (Simulation(policy, num_engines).run() for policy in ("prefix", "round_robin"))
        budget = f"{'within' if ours.decision_us <= BUDGET_US else 'OVER'} {BUDGET_US:.0f} us"
        verdicts = {
            "found_percent": f"bound {'kept' if ours.keeps_bound else 'BROKEN'}",
            "decision_us": f"{budget}, p99 {ours.decision_p99_us:.0f} us",
        }
        for name, field, unit in FIGURES:
            row(
                f"routing: {name}",
                f"{num_engines} engine{'s' * (num_engines > 1)}, {NUM_REQUESTS:,} requests",
                getattr(ours, field),
                getattr(baseline, field),
                "round robin",
                unit=unit,
                higher_is_better=field == "found_percent",
                correct=verdicts.get(field, "yes"),
            )


if __name__ == "__main__":
    main()
