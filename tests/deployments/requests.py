"""Requests to a server of fakes, whose answers can be worked out."""

from __future__ import annotations

import re
import threading

import httpx
import openai

from tests.deployments.served import REBUILD_S, Served, wait_for
from tests.fakes import greedy

PROMPT = "once upon a time"


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)


def expected(num_tokens: int, prompt: str = PROMPT) -> str:
    return bytes(greedy(list(prompt.encode()), num_tokens)).decode()


def complete(served: Served, num_tokens: int, prompt: str = PROMPT) -> str:
    with client(served) as api:
        return api.completions.create(model="fake", prompt=prompt, max_tokens=num_tokens).choices[0].text


class Stream(threading.Thread):
    """A completion that streams in the background; `text` grows, `error` is what ended it early."""

    def __init__(self, served: Served, num_tokens: int):
        super().__init__()
        self.text, self.error, self.num_tokens = "", None, num_tokens
        self.finish_reasons: list[str] = []
        self._served = served
        self.start()

    def run(self) -> None:
        try:
            with client(self._served) as api:
                create = api.completions.create
                for chunk in create(model="fake", prompt=PROMPT, max_tokens=self.num_tokens, stream=True):
                    self.text += chunk.choices[0].text
                    if chunk.choices[0].finish_reason:
                        self.finish_reasons.append(chunk.choices[0].finish_reason)
        except Exception as error:
            self.error = error

    def wait_for_text(self) -> None:
        wait_for(lambda: len(self.text) > 5 or self.error, "streamed text", 60)
        assert self.error is None

    def check(self) -> None:
        """It went on to its end without a lost or repeated token."""
        self.join(REBUILD_S + 60)
        assert not self.is_alive()
        assert self.error is None
        assert self.text == expected(self.num_tokens)
        assert self.finish_reasons == ["length"]


def metric(served: Served, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics", timeout=60).text
    return sum(float(value) for value in re.findall(rf"^pagedray:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))
