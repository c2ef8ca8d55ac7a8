"""Compiled grammars for tests of the worker, and rows that follow them with logits out of a hat."""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xgrammar

from pagedray.engine.grammar.table import token_table
from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.messages import CompiledGrammar, NewSeq, SamplingParams, TokenLogprobs
from pagedray.engine.worker.constraints import Constraints
from pagedray.engine.worker.gpu_sampler import GpuSampler, GpuSamplingState
from pagedray.engine.worker.sampler import Sampler
from pagedray.engine.worker.sampling_state import SamplingState

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zé ]{0,6}$"},
        "tall": {"type": "boolean"},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "tall", "numbers"],
    "additionalProperties": False,
}


class Compiler:
    """What `engine.grammar` does in another process."""

    def __init__(self, vocabulary: Vocabulary):
        self._compiler = xgrammar.GrammarCompiler(token_table(vocabulary), max_threads=1)

    def schema(self, schema: dict[str, Any]) -> CompiledGrammar:
        return message(self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False))

    def regex(self, regex: str) -> CompiledGrammar:
        return message(self._compiler.compile_regex(regex))


def message(compiled: xgrammar.CompiledGrammar) -> CompiledGrammar:
    data = zlib.compress(compiled.serialize_json().encode())
    return CompiledGrammar(hashlib.sha256(data).digest(), data)


def of_bytes(*more: bytes, eos: bytes = b"<eos>") -> Vocabulary:
    """Ids 0 … 255 are bytes, 256 is EOS, then come `more`."""
    tokens = (*(bytes([i]) for i in range(256)), eos, *more)
    return Vocabulary(tokens, special_ids=(256,), eos_ids=(256,))


def text(vocabulary: Vocabulary, ids: Sequence[int]) -> bytes:
    """Without the EOS that ends it."""
    return b"".join(vocabulary.tokens[i] for i in ids if i not in vocabulary.eos_ids)


def allowed(words: np.ndarray, vocab: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little")).tolist()


class Sampled:
    """Tokens of a step that tests hold back: rules may ask for them no earlier than the next step does."""

    def __init__(self, token_ids: list[int], logprobs: dict[int, TokenLogprobs]):
        self.token_ids, self.logprobs, self.num_reads = token_ids, logprobs, 0

    def wait_for_tokens(self) -> list[int]:
        self.num_reads += 1
        return self.token_ids


class Rows:
    """A sampler whose rows are constrained.

    Args:
        logits: of a sequence, by its name, a token's position and the size of the vocabulary.
        device: with the GPU's sampler where given.
    """

    def __init__(
        self,
        num_rows: int,
        vocabulary: Vocabulary,
        logits: Callable[[str, int, int], torch.Tensor],
        device: torch.device | None = None,
    ):
        self.vocabulary, self._logits = vocabulary, logits
        self._vocab = len(vocabulary.tokens)
        self.constraints = Constraints(num_rows, self._vocab, lambda: vocabulary)
        if device is None:
            self.state = SamplingState(num_rows, self._vocab, torch.device("cpu"))
            self.sampler = Sampler(self.state)
        else:
            self.state = GpuSamplingState(num_rows, self._vocab, device)
            self.sampler = GpuSampler(self.state)
        self.seqs: dict[int, NewSeq] = {}
        self.ids: dict[int, list[int]] = {}  # prompt and output, by row

    def add(self, row: int, name: str, params: SamplingParams, output: Sequence[int] = (), prompt: int = 3) -> None:
        eos = () if params.ignore_eos else self.vocabulary.eos_ids
        ids = (*range(prompt), *output)
        seq = NewSeq(name, row, ids, prompt, params, (*params.stop_token_ids, *eos))
        self.state.add(seq)
        self.constraints.add(seq)
        self.seqs[row], self.ids[row] = seq, list(ids)

    def free(self, row: int) -> None:
        self.state.free(row)
        self.constraints.free(row)
        del self.seqs[row], self.ids[row]

    def output(self, row: int) -> list[int]:
        return self.ids[row][self.seqs[row].num_prompt_tokens :]

    def step(self, *rows: int) -> Sampled:
        """Sample a token for each of these rows."""
        positions = [len(self.ids[row]) for row in rows]
        plan: Any = SimpleNamespace(
            sampled=tuple(range(len(rows))),
            sampling_rows=rows,
            sampling_row=np.array(rows),
            sampling_position=np.array(positions),
        )
        logits = torch.stack(
            [self._logits(self.seqs[row].seq_id, at, self._vocab) for row, at in zip(rows, positions, strict=True)]
        )
        masks = self.constraints.masks(plan)
        batch = self.state.gather(rows, positions, masks)
        found = self.sampler.sample(logits.to(self.state.device), batch).to_host(lambda tensor: tensor.cpu())
        tokens, logprobs = found.to_messages()
        for row, token_id in zip(rows, tokens, strict=True):
            self.ids[row].append(token_id)
        sampled = Sampled(tokens, logprobs)
        self.constraints.await_tokens(plan, sampled)
        return sampled

    def finish(self, row: int, most: int = 200) -> list[int]:
        """Run a row alone until EOS; its output."""
        while len(self.output(row)) < most and self.ids[row][-1] not in self.vocabulary.eos_ids:
            self.step(row)
        return self.output(row)


@functools.lru_cache(maxsize=100_000)
def noise(name: str, position: int, vocab: int) -> torch.Tensor:
    """Logits with no sense in them; the same for the same sequence and position."""
    rng = np.random.default_rng([position, *name.encode()])
    return torch.from_numpy(rng.normal(size=vocab).astype(np.float32) * 3)
