"""The periodic line that says how fast the engine works; silent while it has nothing to do."""

from __future__ import annotations

import logging

from pagedray.engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class ThroughputLog:
    """Logs at most once per `interval_s`, and only when a step was committed since."""

    def __init__(self, interval_s: float):
        self._interval_s = interval_s
        self._since_s: float | None = None
        self._last_s = 0.0
        self._prompt_tokens = self._generated_tokens = 0

    def tick(self, now_s: float, prompt_tokens: int, generated_tokens: int, scheduler: Scheduler) -> None:
        """Called after each step with the engine's running totals of tokens."""
        idle = self._since_s is None or now_s - self._last_s > self._interval_s
        self._last_s = now_s
        if idle or self._since_s is None:
            self._since_s, self._prompt_tokens, self._generated_tokens = now_s, prompt_tokens, generated_tokens
            return
        elapsed = now_s - self._since_s
        if elapsed < self._interval_s:
            return
        stats = scheduler.stats()
        queried = stats.prefix_queried_tokens
        log.info(
            "throughput prompt=%.1f tok/s generation=%.1f tok/s running=%d waiting=%d kv=%.1f%% prefix_hits=%.1f%%",
            (prompt_tokens - self._prompt_tokens) / elapsed,
            (generated_tokens - self._generated_tokens) / elapsed,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_usage,
            100 * stats.prefix_hit_tokens / queried if queried else 0.0,
        )
        self._since_s, self._prompt_tokens, self._generated_tokens = now_s, prompt_tokens, generated_tokens
