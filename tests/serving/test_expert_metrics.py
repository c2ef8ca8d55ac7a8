from __future__ import annotations

from pagedray.engine.load_watch import KEPT_S
from tests.fakes import FakeWorker
from tests.serving.rig import Rig


class Sparse(FakeWorker):
    expert_counts = {2: (4, 0, 5), 7: (1, 1, 1)}  # noqa: RUF012


async def test_loads_of_experts_are_counters() -> None:
    async with Rig(Sparse) as rig:
        text = (await rig.http.get("/metrics")).text
        engine = rig.links[0].facts.engine_id
        for series, value in {
            f'moe_layer_tokens_max_total{{engine="{engine}",layer="2"}}': 5.0,
            f'moe_layer_tokens_mean_total{{engine="{engine}",layer="2"}}': 3.0,
            f'moe_layer_tokens_max_total{{engine="{engine}",layer="7"}}': 1.0,
            f'moe_expert_tokens_total{{engine="{engine}",expert="0"}}': 5.0,
            f'moe_expert_tokens_total{{engine="{engine}",expert="2"}}': 6.0,
        }.items():
            assert f"pagedray:{series} {value}\n" in text
        assert KEPT_S >= 5.0  # seconds in which however many scrapes ask the workers once


async def test_a_dense_model_has_no_such_series() -> None:
    async with Rig() as rig:
        assert "moe_" not in (await rig.http.get("/metrics")).text
