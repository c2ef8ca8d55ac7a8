"""The worker as an executor sees it, with a tiny checkpoint on disk."""

import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedray.engine.config import load_config
from pagedray.engine.errors import ConfigError, EngineDead, UnsupportedModel
from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.messages import (
    Constraint,
    NewSeq,
    ReasoningSpan,
    RunnerOutput,
    SamplingParams,
    ScheduledSeq,
    SchedulerOutput,
)
from pagedray.engine.worker import worker as worker_module
from pagedray.engine.worker.runner import ModelRunner, PendingOutput
from pagedray.engine.worker.worker import Worker
from tests.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_worker(name: str = "llama", **settings: Any) -> Worker:
    overrides = {"model": str(tiny_model(name)), "dtype": "float32", "cpu_threads": 1, "block_size": 4, **settings}
    return Worker(load_config(overrides=overrides))


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = make_worker()
    worker.load()
    yield worker
    worker.close()


def first_step(step: int = 0) -> SchedulerOutput:
    new = NewSeq("a", 0, (3, 4, 5), 3, SamplingParams(max_tokens=9, seed=0, temperature=0.0), ())
    return SchedulerOutput(step, (new,), (ScheduledSeq("a", 0, 0, 3, True, ((1, 2, 3),)),), ())


def decode_step(step: int) -> SchedulerOutput:
    return SchedulerOutput(step, (), (ScheduledSeq("a", 0, 2 + step, 1, True, ((),)),), ())


def test_facts_and_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # a second passes whenever somebody looks
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    told: list[tuple[str, float]] = []
    worker = make_worker(
        "gemma3",
        max_num_seqs=2,
        served_model_name=("one", "two"),
        enable_prefix_caching=False,
        attention_backend="torch",
    )
    facts = worker.load(lambda name, seconds: told.append((name, seconds)))
    worker.close()
    assert facts.model_names == ("one", "two")
    assert (facts.vocab_size, facts.max_model_len, facts.block_size) == (512, 512, 4)
    assert facts.block_groups == (None, 16, 16)
    # a window of 16 and a step of 1024 tokens lie in at most 260 blocks, more than a whole sequence takes
    assert (facts.num_blocks, facts.kv_capacity_tokens) == (2 * 3 * 128, 512)
    assert (facts.eos_ids, facts.enable_prefix_caching) == ((2,), False)
    assert (facts.dtype, facts.device, facts.attention_backend) == ("float32", "cpu", "torch")
    assert facts.attention_backend_reason
    assert facts.start_phases == tuple(told)
    told = [phase for phase in told if phase[0] != "compile kernels"]  # the first start on a machine
    names = ["read configuration", "load weights", "pack weights", "allocate kv cache", "warm up"]
    assert told == [(name, 1.0) for name in names]


def test_the_name_and_dtype_come_from_the_checkpoint_by_default() -> None:
    worker = make_worker(dtype="auto")
    facts, other = worker.load(), make_worker(dtype="auto")
    other_facts = other.load()
    worker.close(), other.close()
    assert facts.model_names == (str(tiny_model("llama")),)
    assert facts.dtype == "bfloat16"
    assert facts.engine_id != other_facts.engine_id


def test_warm_up_leaves_no_sequence_behind(worker: Worker) -> None:
    rows = worker._runner.rows
    assert not rows.num_known_cpu.any()
    assert not rows.block_tables_cpu.any()
    assert worker._runner.sampling.rows == [None] * 64


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"num_kv_blocks": 2, "block_size": 1}),
        ("llama", {"max_num_batched_tokens": 1, "max_num_seqs": 1}),
        ("mistral", {"num_kv_blocks": 5, "prefill_chunk_tokens": 1}),  # blocks for a window, whatever the length
    ],
)
def test_warm_up_fits_the_smallest_engine(name: str, settings: dict[str, int]) -> None:
    worker = make_worker(name, **settings)
    worker.load()
    worker.close()


def test_steps_queue_up_and_run_in_order(worker: Worker) -> None:
    worker.submit(first_step())
    worker.submit(decode_step(1))
    worker.submit(decode_step(2))
    results = [worker.result(step) for step in (2, 0, 1)]
    assert [result.step for result in results] == [2, 0, 1]
    alone = make_worker()
    alone.load()
    for step, out in enumerate([first_step(), decode_step(1), decode_step(2)]):
        alone.submit(out)
        assert alone.result(step) == results[(step + 1) % 3]
    alone.close()


def test_submit_returns_before_the_step_is_done(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def wait(pending: PendingOutput) -> RunnerOutput:
        assert release.wait(60)
        return RunnerOutput(pending._out.step, ())

    monkeypatch.setattr(PendingOutput, "wait", wait)
    worker.submit(first_step())
    worker.submit(decode_step(1))
    release.set()
    assert worker.result(1).step == 1


def test_a_step_submitted_again_is_computed_once(worker: Worker) -> None:
    worker.submit(first_step())
    before = worker.result(0)
    worker.submit(first_step())
    assert worker.result(0) is before
    worker.submit(decode_step(1))  # its row would be taken if step 0 had run twice
    assert worker.result(1).token_ids[0] >= 0


def test_a_gap_between_steps_is_an_error(worker: Worker) -> None:
    worker.submit(first_step(7))
    with pytest.raises(ValueError, match="step 9 was submitted after step 7"):
        worker.submit(decode_step(9))
    assert worker.result(7).step == 7


def test_results_of_the_last_few_steps_are_kept(worker: Worker) -> None:
    worker.submit(first_step())
    for step in range(1, 10):
        worker.submit(decode_step(step))
    assert worker.result(9) == worker.result(9)
    assert worker.result(2).step == 2
    for step in (1, 10):
        with pytest.raises(LookupError, match=f"step {step} is not among"):
            worker.result(step)


def test_an_error_in_a_step_surfaces_and_stops_the_worker(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ModelRunner.run

    def fail_at_one(runner: ModelRunner, out: SchedulerOutput) -> PendingOutput:
        if out.step == 1:
            raise RuntimeError("out of something")
        return run(runner, out)

    monkeypatch.setattr(ModelRunner, "run", fail_at_one)
    worker.submit(first_step())
    worker.submit(decode_step(1))
    worker.submit(decode_step(2))
    assert worker.result(0).token_ids[0] >= 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of something"):
            worker.result(1)
    with pytest.raises(EngineDead, match="out of something"):
        worker.result(2)


def test_loads_of_experts_are_those_of_the_steps() -> None:
    """Two of eight experts a token; behind the last layer's attention only the sampled one goes on."""
    worker = make_worker("mixtral")
    worker.load()
    assert worker.expert_loads() == dict.fromkeys(range(3), (0,) * 8)
    worker.submit(first_step())
    assert [sum(counts) for counts in worker.expert_loads().values()] == [6, 6, 2]
    worker.submit(decode_step(1))
    assert [sum(counts) for counts in worker.expert_loads().values()] == [8, 8, 4]
    worker.close()


def test_a_chunk_that_samples_nothing_is_no_load_of_the_last_layer() -> None:
    worker = make_worker("mixtral")
    worker.load()
    new = NewSeq("a", 0, tuple(range(3, 10)), 7, SamplingParams(max_tokens=9, seed=0, temperature=0.0), ())
    worker.submit(SchedulerOutput(0, (new,), (ScheduledSeq("a", 0, 0, 4, False, ((1, 2),)),), ()))
    assert [sum(counts) for counts in worker.expert_loads().values()] == [8, 8, 0]
    worker.submit(SchedulerOutput(1, (), (ScheduledSeq("a", 0, 4, 3, True, ((),)),), ()))
    assert [sum(counts) for counts in worker.expert_loads().values()] == [14, 14, 2]
    assert worker.result(1).token_ids[0] >= 0
    worker.close()


def test_a_dense_model_has_no_loads(worker: Worker) -> None:
    assert worker.expert_loads() == {}


def test_close_ends_the_thread_and_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker()
    worker.load()
    started, release = threading.Event(), threading.Event()
    run = ModelRunner.run

    def slow(runner: ModelRunner, out: SchedulerOutput) -> PendingOutput:
        started.set()
        assert release.wait(60)
        return run(runner, out)

    monkeypatch.setattr(ModelRunner, "run", slow)
    worker.submit(first_step())
    worker.submit(decode_step(1))
    assert started.wait(60)
    closing = threading.Thread(target=worker.close)
    closing.start()
    with pytest.raises(EngineDead, match="closed"):
        worker.result(1)
    closing.join(0.1)
    assert closing.is_alive()  # it waits for the step that runs
    release.set()
    closing.join(60)
    assert worker.result(0).step == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pagedray-worker")]
    worker.close()


def test_threads_default_to_the_cores_it_may_use() -> None:
    for given, expected in [(None, len(os.sched_getaffinity(0))), (1, 1)]:
        worker = make_worker(cpu_threads=given)
        worker.load()
        assert worker._stream.submit(torch.get_num_threads).result() == expected
        worker.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "flashinfer"}, "attention_backend is flashinfer"),
        ({"max_model_len": 513}, "max_model_len is 513.*512"),
        ({"max_model_len": 400, "num_kv_blocks": 50}, "max_model_len is 400.*200 tokens.*num_kv_blocks"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    worker = make_worker(**settings)
    with pytest.raises(ConfigError, match=message):
        worker.load()
    worker.close()


def test_an_unknown_architecture_is_refused_before_its_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LamaForCausalLM"], "n_layer": 2}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    worker = make_worker(model=str(tmp_path))
    with pytest.raises(UnsupportedModel, match="did you mean LlamaForCausalLM"):
        worker.load()
    worker.close()


def test_what_constraints_need_is_loaded_beside_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    may_load, asked = threading.Event(), threading.Event()

    def load(*args: Any) -> Vocabulary:
        asked.set()
        assert may_load.wait(60.0)
        return Vocabulary(tuple(bytes([65 + i % 26]) for i in range(512)), (), (2,))

    monkeypatch.setattr(worker_module, "_load_vocabulary", load)
    worker = make_worker()
    worker.load()
    assert asked.wait(60.0)
    worker.submit(first_step())
    assert len(worker.result(0).token_ids) == 1
    span = ReasoningSpan(b"", b"ZZ", (7,), is_open=True, max_tokens=0)
    params = SamplingParams(max_tokens=9, seed=0, constraint=Constraint(reasoning=span))
    new, part = NewSeq("b", 1, (3, 4), 2, params, ()), ScheduledSeq("b", 1, 0, 2, True, ((4,),))
    worker.submit(SchedulerOutput(1, (new,), (part,), ()))
    may_load.set()  # now a step waits for it
    assert worker.result(1).token_ids == (7,)
    worker.close()
