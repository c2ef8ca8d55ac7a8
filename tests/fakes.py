"""Stand-ins that make the whole path testable in one process, with results that can be worked out by hand.

`FakeWorker` behaves like `engine.worker.worker.Worker`; its next token is a sum (`next_token`) of everything before it,
so a lost, repeated or misplaced token changes all that follow. `ByteTokenizer` maps text to its UTF-8 bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.messages import (
    CompiledGrammar,
    Constraint,
    NewSeq,
    PromptLogprobs,
    RunnerOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from pagedray.engine.text.text_stream import Utf8Stream

EOS_ID = 256
BOS_ID = 257
VOCAB_SIZE = 260


def next_token(token_ids: Sequence[int]) -> int:
    """A printable ASCII byte that depends on every token so far and on how many there are."""
    return 32 + (sum(token_ids) + 7 * len(token_ids)) % 95


def greedy(prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """What FakeWorker generates after `prompt_ids`."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt_ids) :]


def fake_logprobs(token_id: int, k: int) -> TokenLogprobs:
    """Log-probability −(id / 1000) for the token, and for the k ids after it."""
    top = [(token_id + i) % VOCAB_SIZE for i in range(k)]
    return TokenLogprobs(token_id, -token_id / 1000, 1, tuple(top), tuple(-t / 1000 for t in top))


class FakeWorker:
    """One rank without a model. `choose(token_ids, seq)` picks the next token; `step_s` is slept per step.

    It checks what a real worker relies on: rows are free when taken, positions are contiguous, block tables cover them.

    A grammar is what `fake_grammar` makes: its data is the output itself. `constraints` has those of all rows so far.
    """

    choose: Callable[[Sequence[int], NewSeq], int] = staticmethod(lambda ids, seq: scripted(ids, seq))
    step_s = 0.0
    expert_counts: ClassVar[dict[int, tuple[int, ...]]] = {}  # of a dense model

    def __init__(self, config: Config, rank: int = 0, connect: Callable[[Any], Any] | None = None):
        self.config, self.rank = config, rank
        self.rows: dict[int, _FakeRow] = {}
        self.results: dict[int, RunnerOutput] = {}
        self.recent: deque[int] = deque()
        self.last_step: int | None = None
        self.fail_at_step: int | None = None
        self.num_tokens_computed = 0
        self.constraints: list[Constraint | None] = []

    def load(self, on_phase: Callable[[str, float], None] = lambda name, seconds: None) -> EngineFacts:
        on_phase("weights", 0.0)
        cache = self.config.cache
        num_blocks = cache.num_kv_blocks or 256
        capacity = num_blocks * cache.block_size
        return EngineFacts(
            model_names=self.config.model.served_model_name or ("fake",),
            vocab_size=VOCAB_SIZE,
            max_model_len=self.config.model.max_model_len or min(2048, capacity),
            block_size=cache.block_size,
            num_blocks=num_blocks,
            block_groups=(None,),
            kv_capacity_tokens=capacity,
            eos_ids=(EOS_ID,),
            enable_prefix_caching=cache.enable_prefix_caching,
            dtype="float32",
            device="cpu",
            attention_backend="fake",
            attention_backend_reason="there is no model",
            engine_id=f"fake-{time.monotonic_ns()}",
            start_phases=(("weights", 0.0),),
        )

    def submit(self, out: SchedulerOutput) -> None:
        if out.step in self.results:
            return
        assert self.last_step is None or out.step == self.last_step + 1, (self.last_step, out.step)
        self.last_step = out.step
        self.results[out.step] = self._run(out)
        self.recent.append(out.step)
        while len(self.recent) > 8:
            del self.results[self.recent.popleft()]

    def result(self, step: int) -> RunnerOutput:
        if self.step_s:
            time.sleep(self.step_s)
        if step == self.fail_at_step:
            raise RuntimeError(f"injected failure in step {step}")
        return self.results[step]

    def expert_loads(self) -> dict[int, tuple[int, ...]]:
        return self.expert_counts

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.rows.clear()

    def _run(self, out: SchedulerOutput) -> RunnerOutput:
        for row in out.freed_rows:
            del self.rows[row]
        for seq in out.added:
            assert seq.row not in self.rows, f"row {seq.row} is taken"
            self.rows[seq.row] = _FakeRow(seq)
            self.constraints.append(seq.params.constraint)
        failed = tuple((seq.seq_id, "its constraint failed: broken") for seq in out.added if _grammar(seq) == BROKEN)
        tokens, logprobs, prompts = [], [], []
        for item in out.scheduled:
            row = self.rows[item.row]
            assert row.seq.seq_id == item.seq_id
            assert item.start == row.num_computed or row.num_computed == 0, "positions are not contiguous"
            row.num_computed = item.start + item.num_tokens
            self.num_tokens_computed += item.num_tokens
            row.num_blocks += len(item.new_blocks[0])
            assert row.num_blocks * self.config.cache.block_size >= row.num_computed, "block table is too short"
            assert item.samples == (row.num_computed == len(row.ids))
            params = row.seq.params
            if params.prompt_logprobs is not None:
                first, last = item.start + 1, min(row.num_computed + 1, row.seq.num_prompt_tokens)
                entries = tuple(fake_logprobs(t, params.prompt_logprobs) for t in row.ids[first:last])
                prompts.append(PromptLogprobs(first, entries) if entries else None)
            else:
                prompts.append(None)
            if item.samples:
                token = type(self).choose(row.ids, row.seq)
                row.ids.append(token)
                tokens.append(token)
                logprobs.append(None if params.logprobs is None else fake_logprobs(token, params.logprobs))
            else:
                tokens.append(-1)
                logprobs.append(None)
        return RunnerOutput(out.step, tuple(tokens), tuple(logprobs), tuple(prompts), failed)


class _FakeRow:
    def __init__(self, seq: NewSeq):
        self.seq = seq
        self.ids = list(seq.token_ids)
        self.num_computed = 0
        self.num_blocks = 0


def scripted(token_ids: Sequence[int], seq: NewSeq) -> int:
    """`next_token`, unless the request has a grammar or allowed_token_ids: those are played back in order.

    So a test can have any byte sequence generated: allowed_token_ids = the bytes wanted, of which the last one repeats;
    or fake_grammar(the bytes wanted), after which the output ends.
    """
    grammar = _grammar(seq)
    script = seq.params.allowed_token_ids if grammar is None else (*grammar.data, EOS_ID)
    if not script:
        return next_token(token_ids)
    return script[min(len(token_ids) - seq.num_prompt_tokens, len(script) - 1)]


def fake_grammar(output: bytes) -> CompiledGrammar:
    """What a compiler of grammars returns in tests with `FakeWorker`, which then generates `output` and EOS."""
    return CompiledGrammar(key=b"fake " + output, data=output)


BROKEN = CompiledGrammar(key=b"broken", data=b"")  # fails its request in the worker


def _grammar(seq: NewSeq) -> CompiledGrammar | None:
    constraint = seq.params.constraint
    return None if constraint is None else constraint.grammar


class SlowFakeWorker(FakeWorker):
    """20 ms a step, long enough to interfere with."""

    step_s = 0.02


class ByteTokenizer:
    """Token i < 256 is byte i; 256 is <eos>, 257 is <bos>, the rest are <extra>."""

    vocab_size = VOCAB_SIZE
    eos_ids = (EOS_ID,)
    special_ids = frozenset(range(256, VOCAB_SIZE))
    chat_template: str | None = "fake"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        data = b"".join(b"" if skip_special_tokens and i >= 256 else self.token_bytes(i) for i in ids)
        return data.decode("utf-8", "replace")

    def text_stream(self, skip_special_tokens: bool) -> Utf8Stream:
        return Utf8Stream(self.token_bytes, range(256, VOCAB_SIZE) if skip_special_tokens else ())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else {EOS_ID: b"<eos>", BOS_ID: b"<bos>"}.get(token_id, b"<extra>")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def template_uses(self, name: str) -> bool:
        return False

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        parts = [f"{message['role']}:{message['content']}\n" for message in messages]
        if continue_final_message:
            parts[-1] = parts[-1].removesuffix("\n")
        return "".join(parts) + ("assistant:" if add_generation_prompt else "")
