"""Which layers each stage of a pipeline has. Pure numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from pagedray.engine.config import WorkerConfig
from pagedray.engine.errors import ConfigError
from pagedray.engine.models.spec import ModelSpec


def stage_spec(spec: ModelSpec, stage: int, num_stages: int, pipeline_layers: Sequence[int] = ()) -> ModelSpec:
    """The model as one stage sees it.

    Args:
        pipeline_layers: number of layers of each stage; empty: as even as can be.

    Raises:
        ConfigError: the layers don't go round, or `pipeline_layers` doesn't fit them.
    """
    ranges = _given_ranges(spec, num_stages, pipeline_layers) if pipeline_layers else even_ranges(spec, num_stages)
    layers = ranges[stage]
    return dataclasses.replace(spec, stage=None if num_stages == 1 else (layers.start, layers.stop))


def check_ranks(spec: ModelSpec, worker: WorkerConfig) -> None:
    """Whether this model can be shared by the ranks that these settings ask for; before any of them is started.

    Raises:
        ConfigError: with the numbers that don't go together.
    """
    spec.of_one_rank(worker.tensor_parallel_size)
    stage_spec(spec, 0, worker.pipeline_parallel_size, worker.pipeline_layers)
    if worker.enable_expert_parallel and spec.experts is None:
        raise ConfigError(
            f"enable_expert_parallel needs a model with experts, {spec.architecture} has none; leave it off"
        )


def even_ranges(spec: ModelSpec, num_stages: int) -> list[range]:
    """Of all splits with the lightest heaviest stage, that whose stages weigh most alike.

    A layer weighs its parameters. The first stage has the embedding's beside them, and the last the head's.
    """
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}, the model has {spec.num_layers} layers and each stage needs one; "
            "lower it"
        )
    costs = [_layer_parameters(spec, layer) for layer in range(spec.num_layers)]
    costs[0] += spec.vocab_size * spec.hidden
    costs[-1] += spec.vocab_size * spec.hidden
    return _even_split(costs, num_stages)


def _given_ranges(spec: ModelSpec, num_stages: int, counts: Sequence[int]) -> list[range]:
    text = ",".join(map(str, counts))
    if len(counts) != num_stages:
        raise ConfigError(
            f"pipeline_layers {text} is for {len(counts)} stages, pipeline_parallel_size is {num_stages}; "
            "give one number a stage"
        )
    if min(counts) < 1 or sum(counts) != spec.num_layers:
        raise ConfigError(
            f"pipeline_layers {text} has {sum(counts)} layers, the model has {spec.num_layers}; "
            "they must be as many, and each stage needs one"
        )
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _even_split(costs: Sequence[int], num_parts: int) -> list[range]:
    """Contiguous parts, none empty."""
    heaviest, _ = _least(costs, num_parts, max)
    _, ends = _least(costs, num_parts, lambda so_far, cost: so_far + cost**2 if cost <= heaviest else math.inf)
    return [range(*pair) for pair in itertools.pairwise((0, *ends))]


def _least(costs: Sequence[int], num_parts: int, add: Callable[[float, int], float]) -> tuple[float, tuple[int, ...]]:
    """Adds up the costs of a split's parts, from 0 on: the least sum, and where that split's parts end.

    Among equal ones it is the split with the longest first part: the last stage also samples.
    """
    total = [0, *itertools.accumulate(costs)]
    found: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}  # end of the parts so far → their sum, their ends
    for part in range(num_parts):
        found = {
            end: min(
                (
                    (add(so_far, total[end] - total[start]), (*ends, end))
                    for start, (so_far, ends) in found.items()
                    if start < end
                ),
                key=lambda split: (split[0], [-end for end in split[1]]),
            )
            for end in range(part + 1, len(costs) + 1)
        }
    return found[len(costs)]


def _layer_parameters(spec: ModelSpec, layer: int) -> int:
    """Of its matrices."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads  # of query, key, value and output projections
    inner = spec.intermediate
    if spec.experts is not None and spec.experts.is_sparse[layer]:
        inner = spec.experts.num_experts * spec.experts.intermediate + spec.experts.shared_intermediate
    return spec.hidden * (heads * spec.head_dim + 3 * inner)
