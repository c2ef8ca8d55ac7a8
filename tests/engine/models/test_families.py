"""Every family's greedy output equals transformers', token for token, however the work is cut into steps."""

from __future__ import annotations

import functools

import pytest
import torch

from pagedray.engine.block_tables import capacity_tokens
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.spec import layer_groups
from tests.engine.models.cases import CASES, VOCAB_SIZE
from tests.step_loop import StepLoop
from tests.tiny_models import tiny_model

BLOCK_SIZE = 4
MAX_TOKENS = 20
PROMPT_LENGTHS = (1, 5, 16, 17, 31, 40, 48, 70)  # around multiples of the block size and beyond windows of 16
NUM_SHARED = 24  # the longer ones begin alike, with six full blocks
MIN_GAP = 0.005  # between the best and second-best logit; float32 noise is near 1e-5
MAX_STEP_TOKENS = 256


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)

    def draw(num: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (num,), generator=generator).tolist()

    shared = draw(NUM_SHARED)
    return [shared + draw(n - NUM_SHARED) if n > NUM_SHARED else draw(n) for n in PROMPT_LENGTHS]


@functools.cache
def in_transformers(name: str):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def expected(name: str) -> list[list[int]]:
    """Greedy output of transformers for each prompt alone, in float32, past EOS."""
    model = in_transformers(name)
    outputs = []
    for ids in prompts():
        tokens = torch.tensor([ids])
        done = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack([logits[0] for logits in done.logits]).topk(2).values
        gap = float((best[:, 0] - best[:, 1]).min())
        assert gap > MIN_GAP, f"{name}: two best logits differ by {gap:.4f}; give the case another seed"
        outputs.append(done.sequences[0, len(ids) :].tolist())
    return outputs


def settings(**more: object) -> dict[str, object]:
    return {
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": 1000,
        "max_num_seqs": 8,
        "max_num_batched_tokens": MAX_STEP_TOKENS,
        **more,
    }


def smallest_pool(name: str, chunk: int) -> int:
    """Blocks that just hold the longest sequence when it is alone."""
    windows = tuple(group.window for group in layer_groups(model_spec(open_checkpoint(str(tiny_model(name)))).windows))
    needed = max(PROMPT_LENGTHS) + MAX_TOKENS
    return next(num for num in range(1, 1000) if capacity_tokens(num, BLOCK_SIZE, windows, chunk, needed) >= needed)


@pytest.mark.parametrize("run_ahead,chunk", [(1, 1), (2, 7), (3, 16), (2, None), (1, None), (3, 7)])
@pytest.mark.parametrize("name", CASES)
def test_a_batch_cold_then_warm(name, run_ahead, chunk):
    with StepLoop(str(tiny_model(name)), **settings(run_ahead=run_ahead, prefill_chunk_tokens=chunk)) as loop:
        cold = loop.generate(prompts(), MAX_TOKENS)
        warm = loop.generate(prompts(), MAX_TOKENS)
    assert [output.token_ids for output in cold] == expected(name)
    assert [output.token_ids for output in warm] == expected(name)
    full_blocks = [(num - 1) // BLOCK_SIZE * BLOCK_SIZE for num in PROMPT_LENGTHS]
    assert [output.num_cached_tokens for output in warm] == full_blocks


@pytest.mark.parametrize("chunk", [7, None])
@pytest.mark.parametrize("name", CASES)
def test_a_batch_without_compiled_attention(name, chunk):
    with StepLoop(str(tiny_model(name)), **settings(prefill_chunk_tokens=chunk, attention_backend="torch")) as loop:
        assert loop.facts.attention_backend == "torch"
        assert [output.token_ids for output in loop.generate(prompts(), MAX_TOKENS)] == expected(name)


@pytest.mark.parametrize("run_ahead,chunk", [(1, None), (2, 7)])
@pytest.mark.parametrize("name", CASES)
def test_one_at_a_time(name, run_ahead, chunk):
    with StepLoop(str(tiny_model(name)), **settings(run_ahead=run_ahead, prefill_chunk_tokens=chunk)) as loop:
        for ids, tokens in zip(prompts(), expected(name), strict=True):
            (output,) = loop.generate([ids], MAX_TOKENS)
            assert output.token_ids == tokens


@pytest.mark.parametrize(
    "run_ahead,chunk,caching", [(1, 7, True), (2, 16, True), (3, 3, True), (2, 7, False), (1, 16, False)]
)
@pytest.mark.parametrize("name", CASES)
def test_preempted_sequences_go_on_as_if_nothing_happened(name, run_ahead, chunk, caching):
    tight = {
        "num_kv_blocks": smallest_pool(name, chunk),
        "enable_prefix_caching": caching,
        "run_ahead": run_ahead,
        "prefill_chunk_tokens": chunk,
    }
    with StepLoop(str(tiny_model(name)), **settings(**tight)) as loop:
        outputs = loop.generate(prompts(), MAX_TOKENS)
        assert loop.scheduler.stats().num_preemptions > 0
    assert [output.token_ids for output in outputs] == expected(name)


@pytest.mark.parametrize("name", CASES)
def test_eos_ends_a_sequence_where_transformers_would(name):
    """The token that comes third is declared a stop id."""
    with StepLoop(str(tiny_model(name)), **settings()) as loop:
        for ids, tokens in zip(prompts()[:4], expected(name), strict=False):
            (output,) = loop.generate([ids], MAX_TOKENS, stop_token_ids=(tokens[2],))
            assert output.token_ids == tokens[: tokens.index(tokens[2]) + 1]
            assert output.finish_reason == "stop"


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logprobs_of_prompt_and_output_for_any_chunk_size_cold_and_warm(name, chunk):
    ids, tokens = prompts()[-1], expected(name)[-1]
    with torch.inference_mode():
        scores = in_transformers(name)(torch.tensor([ids + tokens[:-1]])).logits[0].log_softmax(-1)
    targets = torch.tensor((ids + tokens)[1:])
    logprobs = scores.gather(1, targets[:, None])[:, 0]
    ranks = (scores > logprobs[:, None]).sum(1) + 1
    with StepLoop(str(tiny_model(name)), **settings(prefill_chunk_tokens=chunk)) as loop:
        for _ in range(2):
            (output,) = loop.generate([ids], MAX_TOKENS, logprobs=2, prompt_logprobs=2)
            entries = output.prompt_logprobs + output.logprobs
            assert [entry.token_id for entry in entries] == targets.tolist()
            assert [entry.rank for entry in entries] == ranks.tolist()
            torch.testing.assert_close(torch.tensor([entry.logprob for entry in entries]), logprobs, rtol=0, atol=1e-4)
            best = scores.topk(2)
            assert [list(entry.top_ids) for entry in entries] == best.indices.tolist()
            found = torch.tensor([entry.top_logprobs for entry in entries])
            torch.testing.assert_close(found, best.values, rtol=0, atol=1e-4)
