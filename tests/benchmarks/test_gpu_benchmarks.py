"""The GPU benchmarks run, at tiny shapes on the CPU: nothing here says how fast anything is."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_engine, gpu_kernels, gpu_served
from benchmarks.kernel_work import WORKS
from benchmarks.model_shapes import write_model
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.spec import ModelSpec
from tests.serving.rig import Rig

KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a benchmark's main; gives the rows it wrote to its file of JSON lines."""

    def run(main: Callable[[list[str]], None], *argv: str) -> list[dict[str, Any]]:
        file = tmp_path / "rows.jsonl"
        main([*argv, "--json-lines", str(file)])
        return [json.loads(line) for line in file.read_text().splitlines()]

    return run


def num_weights(spec: ModelSpec) -> int:
    heads = spec.num_heads * spec.head_dim
    feed_forward = 3 * spec.intermediate
    if spec.experts is not None:
        assert all(spec.experts.is_sparse)
        feed_forward = spec.experts.num_experts * (3 * spec.experts.intermediate + 1)
    layer = spec.hidden * (2 * heads + 2 * spec.num_kv_heads * spec.head_dim + feed_forward + 2)
    return spec.num_layers * layer + spec.hidden * (1 + spec.vocab_size * (1 if spec.tie_embeddings else 2))


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *(("llama-3.1-8b", 8030), ("qwen3-0.6b", 596), ("qwen3-8b", 8191), ("smollm2-135m", 135)),
        *(("mixtral-8x7b", 46703), ("qwen3-30b-a3b", 30532)),
    ],
)
def test_a_written_model_has_the_size_in_its_name(tmp_path: Path, name: str, millions: int) -> None:
    spec = model_spec(open_checkpoint(str(write_model(name, tmp_path)), needs_weights=False))
    assert round(num_weights(spec) / 1e6) == millions
    assert spec.dtype == "bfloat16"
    assert spec.eos_ids


def test_a_written_model_has_the_tokenizer_it_was_given(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    with pytest.raises(ValueError, match="no tokenizer files"):
        write_model("tiny", tmp_path, given)
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (given / name).write_text(f"this is {name}")
    path = write_model("tiny", tmp_path, given)
    assert path == tmp_path / "tiny"
    assert (path / "tokenizer.json").read_text() == "this is tokenizer.json"
    assert not (path / "model.safetensors").exists()
    with pytest.raises(ValueError, match=r"known: llama-3\.1-8b, "):
        write_model("llama", tmp_path)


def test_the_time_of_a_step_is_that_of_the_steady_part() -> None:
    # Two sequences: prefill, both decode from 5.0 s on, one ends after 5.4 s.
    steps = [(1.0, 1), (5.0, 2), (5.1, 2), (5.2, 2), (5.4, 2), (9.0, 1)]
    assert gpu_engine.step_seconds(steps, 2) == pytest.approx(0.4 / 3)
    # A step that reached one of them only lets the other wait: each waits 4 tokens' time, 3.5 came for each.
    steps = [(5.0, 2), (5.1, 2), (5.2, 1), (5.3, 2), (5.4, 2)]
    assert gpu_engine.step_seconds(steps, 2) == pytest.approx(0.4 * 2 / 7)
    with pytest.raises(ValueError, match="no two steps"):
        gpu_engine.step_seconds(steps, 3)


def test_the_engine_benchmark_runs(rows: Callable[..., list[dict[str, Any]]]) -> None:
    tiny = ("--model", "tiny", "--device", "cpu", "--repeats", "1", "--set", "num_kv_blocks=64", "--batch", "1,2,100")
    found = rows(gpu_engine.main, *tiny)
    assert [(row["op"], row["correct"]) for row in found] == [
        ("start", "-"),
        ("decode step", "yes"),
        ("decode step", "yes"),
        ("offline, output", "yes"),
        ("offline, total", "yes"),
    ]
    assert all(row["ours"] > 0 and row["set"] == {"num_kv_blocks": "64"} for row in found)
    assert {"import", "load weights", "warm up"} <= found[0]["start_phases"].keys()
    assert found[3]["ours"] * 20 == pytest.approx(found[4]["ours"] * 12)  # 12 tokens out, 8 in


def test_the_kernel_benchmark_runs(rows: Callable[..., list[dict[str, Any]]]) -> None:
    found = rows(gpu_kernels.main, "--device", "cpu", "--rounds", "1")
    assert {row["op"] for row in found} == WORKS.keys()
    assert {row["correct"] for row in found} == {"yes"}


def test_every_triton_kernel_has_a_benchmark() -> None:
    launches = {
        name
        for path in KERNELS.glob("*.py")
        for name in re.findall(r"^def (\w+)_triton\(", path.read_text(), re.MULTILINE)
        if not name.startswith("_")
    }
    assert launches == WORKS.keys()


@pytest.mark.parametrize("name", ["gpu_engine", "gpu_idle", "gpu_kernels"])
def test_without_a_gpu_a_benchmark_says_that_it_needs_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    importlib.import_module(f"benchmarks.{name}").main([])
    assert "needs a GPU" in capsys.readouterr().out


def test_without_a_server_its_benchmark_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_served.main([])
    assert "--url" in capsys.readouterr().out


async def test_the_served_benchmark_runs(rows: Callable[..., list[dict[str, Any]]]) -> None:
    async with Rig(max_num_seqs=4) as rig, rig.served() as url:
        options = (
            "--model fake --input-len 5 --output-len 7 --concurrency 1,3 --requests-per-stream 2 --max-token-id 90"
        )
        found = await asyncio.to_thread(rows, gpu_served.main, "--url", url, *options.split())
        await rig.idle()
        assert rig.engine.stats().finished == {"length": 1 + 2 + 3 + 6}  # those of the warm-ups, too
    assert [row["case"].split(" 7 ")[1] for row in found[:4]] == ["output", "first token", "first, p99", "per token"]
    assert [row["num_requests"] for row in found] == [2] * 4 + [6] * 4
    assert all(row["ours"] > 0 for row in found)


async def lines_of(data: bytes) -> list[bytes]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return [line async for line in gpu_served.body_lines(reader)]


async def test_lines_are_whole_whatever_chunks_they_come_in() -> None:
    head, body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"data: 1\n\ndata: 22\n\n"
    for size in range(1, len(body) + 1):
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        chunked = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])
        assert await lines_of(head + chunked) == [b"data: 1", b"", b"data: 22", b""]
    assert await lines_of(b"HTTP/1.1 200 OK\r\n\r\n" + body) == [b"data: 1", b"", b"data: 22", b""]


async def test_a_refusal_is_an_error_with_the_servers_words() -> None:
    with pytest.raises(RuntimeError, match=r"404 Not Found: no model"):
        await lines_of(b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\nno model")
