"""What one ingress knows of its engines, and its choice among them. Ingresses share nothing and need no lock.

An engine's load is what this ingress has in flight there, counted here and exact at any moment, and what the others
have, as the engine last told. It tells each ingress of the others' requests only, so none is counted twice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from pagedray.engine.messages import EngineNews, Request
from pagedray.serving.prefix_index import PrefixIndex, shorten
from pagedray.serving.routing import OUTCOMES, POLICIES, Outcome, Situation, load, session, session_rank

MAX_SESSION_BYTES = 256  # of a session's name that tell it from others


class RoutedEngine:
    """An engine as a router sees it."""

    def __init__(self, engine_id: str, slot: int):
        self.engine_id = engine_id
        self.slot = slot
        self.key = _key(engine_id.encode())
        self.load = 0.0  # in requests, see routing.load
        self.news: EngineNews | None = None
        self.own_requests = self.own_tokens = 0

    def count(self) -> None:
        requests, tokens = self.own_requests, self.own_tokens
        if self.news is not None:
            requests, tokens = requests + self.news.other_requests, tokens + self.news.other_tokens
        self.load = load(requests, tokens)


class Router:
    """
    Args:
        policy: a name in `routing.POLICIES`.
        factor: bound on imbalance, see `routing`.
        turn: where ties begin to go round. Ingresses that begin at different ones don't all start with one engine.
    """

    def __init__(self, policy: str = "prefix", factor: float = 2.0, turn: int = 0):
        self._policy_name, self._policy = policy, POLICIES[policy]
        self._factor = factor
        self._turn = turn
        self._index = PrefixIndex()
        self.engines: list[RoutedEngine] = []
        # (policy, outcome) → decisions
        self.decisions: Counter[tuple[str, Outcome]] = Counter(
            {(name, outcome): 0 for name in (policy, "session") for outcome in OUTCOMES}
        )

    def add(self, engine_id: str) -> RoutedEngine:
        engine = RoutedEngine(engine_id, self._index.open())
        self.engines.append(engine)
        return engine

    def remove(self, engine: RoutedEngine) -> None:
        """It is gone, and with it all that is known of it."""
        if engine in self.engines:
            self.engines.remove(engine)
            self._index.close(engine.slot)

    def hear(self, engine: RoutedEngine, news: EngineNews) -> None:
        if engine in self.engines:
            engine.news = news
            engine.count()
            if self._uses_prefixes:
                self._index.apply(engine.slot, news.cache)

    def choose(self, among: Sequence[RoutedEngine], requests: Sequence[Request], name: bytes | None) -> RoutedEngine:
        """The engine for requests that go together.

        Args:
            among: engines that may be chosen, at least one.
            name: of the session that they belong to, if the client gave one.
        """
        self._turn += 1
        short = shorten(requests[0].block_hashes) if self._uses_prefixes else []
        loads = [engine.load for engine in among]
        cost = load(len(requests), sum(request.num_tokens for request in requests))
        if name is not None:
            key = _key(name[:MAX_SESSION_BYTES])
            ranks = [session_rank(key, engine.key) for engine in among]
            choice = session(Situation(loads, cost, self._factor, self._turn, ranks=ranks))
        else:
            found = self._index.matches(short) if short else {}
            matches = [found.get(engine.slot, 0) for engine in among] if found else ()
            choice = self._policy(Situation(loads, cost, self._factor, self._turn, matches=matches))
        self.decisions["session" if name is not None else self._policy_name, choice.outcome] += 1
        chosen = among[choice.engine]
        if short:  # before the engine can tell: requests that come meanwhile may share the beginning
            self._index.add(chosen.slot, short)
        return chosen

    def sent(self, engine: RoutedEngine, request: Request) -> None:
        engine.own_requests += 1
        engine.own_tokens += request.num_tokens
        engine.count()

    def ended(self, engine: RoutedEngine, request: Request) -> None:
        """A request that was sent has ended there, or was moved away."""
        engine.own_requests -= 1
        engine.own_tokens -= request.num_tokens
        engine.count()

    @property
    def _uses_prefixes(self) -> bool:
        return self._policy_name == "prefix"


def _key(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
