import dataclasses

import pytest

from pagedray.engine.config import WorkerConfig
from pagedray.engine.errors import ConfigError
from pagedray.engine.models.spec import ExpertSpec, layer_groups, layer_places
from pagedray.engine.models.stages import check_ranks, even_ranges, stage_spec
from tests.engine.worker.test_input_batch import tiny_spec


def spec(num_layers, **changes):
    """A layer has 8 * (6 * 4 + 3 * 8) = 384 parameters, and 48 ids have as many."""
    return dataclasses.replace(tiny_spec((None,) * num_layers), vocab_size=48, **changes)


def counts(spec, num_stages):
    return [len(layers) for layers in even_ranges(spec, num_stages)]


@pytest.mark.parametrize(
    ("num_layers", "vocab_size", "num_stages", "expected"),
    [
        (12, 1, 3, [4, 4, 4]),
        (10, 0, 3, [4, 3, 3]),
        (10, 1, 3, [3, 4, 3]),
        (10, 48, 3, [3, 4, 3]),  # embedding and head are one layer each
        (10, 48, 2, [5, 5]),
        (12, 4 * 48, 4, [1, 5, 5, 1]),
        (3, 10_000, 3, [1, 1, 1]),  # none is empty, whatever the ends weigh
        (5, 48, 1, [5]),
        (80, 10 * 48, 8, [3, 13, 13, 13, 12, 12, 12, 2]),
    ],
)
def test_stages_weigh_alike(num_layers, vocab_size, num_stages, expected):
    found = even_ranges(dataclasses.replace(spec(num_layers), vocab_size=vocab_size), num_stages)
    assert [len(layers) for layers in found] == expected
    assert [layer for layers in found for layer in layers] == list(range(num_layers))


def test_layers_with_experts_weigh_more():
    experts = ExpertSpec(4, 2, intermediate=8, renormalise=True, is_sparse=(True,) * 2 + (False,) * 6)
    assert counts(spec(8), 2) == [4, 4]
    assert counts(spec(8, experts=experts), 2) == [3, 5]


def test_a_stage_sees_the_whole_model_and_its_own_layers():
    whole = spec(10)
    stages = [stage_spec(whole, stage, 3) for stage in range(3)]
    assert [stage.layers for stage in stages] == [range(3), range(3, 7), range(7, 10)]
    assert [(stage.is_first_stage, stage.is_last_stage) for stage in stages] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert all(dataclasses.replace(stage, stage=None) == whole for stage in stages)
    assert stage_spec(whole, 0, 1) == whole
    assert (whole.layers, whole.is_first_stage, whole.is_last_stage) == (range(10), True, True)


def test_layers_may_be_given():
    assert [stage_spec(spec(10), i, 3, (2, 7, 1)).layers for i in range(3)] == [range(2), range(2, 9), range(9, 10)]


@pytest.mark.parametrize(
    ("num_stages", "given", "part"),
    [
        (3, (5, 5), "pipeline_layers 5,5 is for 2 stages, pipeline_parallel_size is 3"),
        (2, (5, 6), "pipeline_layers 5,6 has 11 layers, the model has 10"),
        (3, (5, 0, 5), "each stage needs one"),
        (11, (), "pipeline_parallel_size is 11, the model has 10 layers"),
    ],
)
def test_stages_that_cannot_be_are_refused_with_the_numbers(num_stages, given, part):
    with pytest.raises(ConfigError, match=part):
        stage_spec(spec(10), 0, num_stages, given)


GEMMA = ((1024,) * 5 + (None,)) * 4 + (1024, 1024)


@pytest.mark.parametrize("windows", [(None,) * 7, (16, 16, None) * 3, GEMMA, (4, None)])
def test_all_layers_together_lie_as_their_groups_say(windows):
    expected = {
        layer: (index, slot)
        for index, group in enumerate(layer_groups(windows))
        for slot, layer in enumerate(group.layers)
    }
    assert layer_places(windows, range(len(windows))) == expected


@pytest.mark.parametrize("windows", [(None,) * 7, (16, 16, None) * 3, GEMMA])
def test_the_layers_of_a_stage_have_places_of_their_own_in_groups_of_their_window(windows):
    groups = layer_groups(windows)
    for first in range(len(windows)):
        for end in range(first + 1, len(windows) + 1):
            places = layer_places(windows, range(first, end))
            assert sorted(places) == list(range(first, end))
            assert len(set(places.values())) == len(places)
            assert all(groups[group].window == windows[layer] for layer, (group, _) in places.items())


def test_half_of_gemmas_layers_need_half_of_its_pages():
    slots = {slot for _, slot in layer_places(GEMMA, range(13)).values()}
    assert (len(layer_groups(GEMMA)[0].layers), slots) == (4, {0, 1})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size is 5, the model has 4 layers"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": (1, 2)}, "pipeline_layers"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "enable_expert_parallel needs a model with experts",
        ),
    ],
)
def test_what_a_model_cannot_be_shared_by_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        check_ranks(spec(4), WorkerConfig(**settings))
    check_ranks(spec(4), WorkerConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
