"""The worker and the tokenizer of an engine that lives in this process, without Ray."""

from __future__ import annotations

from collections.abc import Callable

from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import Config
from pagedray.engine.executor import RankWorker, StepWorker
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.stages import check_ranks
from pagedray.engine.text.tokenizer import Tokenizer, load_tokenizer


def local_worker(config: Config, worker_class: Callable[..., RankWorker] | None = None) -> StepWorker:
    """One rank in this process, or rank 0 here and each other one in a process of its own. Nothing is loaded yet.

    Args:
        worker_class: builds the worker of a rank; None: the one that computes.
    """
    if worker_class is None:
        from pagedray.engine.worker.worker import Worker

        worker_class = Worker
    if config.worker.num_ranks == 1:
        return worker_class(config)
    from pagedray.engine.worker.spawned_gang import SpawnedGang

    return SpawnedGang(config, worker_class)


def local_tokenizer(config: Config) -> Tokenizer:
    """The checkpoint's. Raises: ConfigError, also where its model can't be split over the ranks: before any starts."""
    leaf = config.model
    checkpoint = open_checkpoint(leaf.model, leaf.revision, leaf.needs_weights)
    if config.worker.num_ranks > 1:
        check_ranks(model_spec(checkpoint), config.worker)
    return load_tokenizer(checkpoint, leaf.chat_template)
