"""`Tokenizer`: text to token ids and back, and a conversation to text. The same for GGUF files and directories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from pagedray.engine.errors import ConfigError, UserError
from pagedray.engine.text.chat_template import ChatTemplate
from pagedray.engine.text.text_stream import ONE_PER_BYTE, TextStream, Utf8Stream, WindowStream

if TYPE_CHECKING:
    from pagedray.engine.checkpoint import Checkpoint

SPACE = "\u2581"  # what sentencepiece writes for a space


def load_tokenizer(checkpoint: Checkpoint, chat_template: str | None = None) -> Tokenizer:
    """The checkpoint's tokenizer.

    Args:
        chat_template: file with a Jinja template (or the template itself) that replaces the model's.

    Raises:
        ConfigError: the checkpoint has no tokenizer, one that isn't implemented, or the template can't be used.
    """
    if checkpoint.gguf is not None:
        from pagedray.engine.text.gguf_tokenizer import read_gguf_tokenizer

        tokenizer = read_gguf_tokenizer(checkpoint.gguf.file.metadata)
    else:
        from pagedray.engine.text.hf_tokenizer import read_hf_tokenizer

        tokenizer = read_hf_tokenizer(checkpoint)
    if chat_template is not None:
        tokenizer.use_chat_template(_read_template(chat_template))
    return tokenizer


class Tokenizer:
    """A `tokenizers.Tokenizer` with what serving needs around it.

    Encoding equals transformers'. So does decoding, but for runs of byte tokens that aren't valid UTF-8 as a whole:
    there characters that are complete stay, while transformers replaces every byte of the run; and spaces before
    punctuation are never removed (`clean_up_tokenization_spaces`). Decoding equals what a `Detokenizer` streams.

    Args:
        backend: the tokenizer; it is taken over and changed.
        special_tokens: variables of chat templates, e.g. {"bos_token": "<s>"}.
        eos_ids: ids that end generation.
        chat_templates: name → Jinja source; "default", and perhaps "tool_use" for requests with tools.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self._templates = {name: ChatTemplate(source) for name, source in (chat_templates or {}).items()}
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._bytes: dict[int, bytes] = {}
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._is_byte_fallback, self._strips_space = _byte_fallback(decoder)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the template for requests without tools."""
        return self._templates["default"].source if "default" in self._templates else None

    def template_uses(self, name: str) -> bool:
        """Whether a chat template reads a variable, such as tools."""
        return any(template.uses(name) for template in self._templates.values())

    def use_chat_template(self, source: str) -> None:
        """Replace the model's chat templates. Raises: ConfigError when the template has an error."""
        template = ChatTemplate(source)
        template.check()
        self._templates = {"default": template}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as text, to be encoded with add_special_tokens=False: the template writes bos itself.

        Args:
            messages: dicts with role and content, as in the chat API.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: end where the last message's content ends; not together with the former.
            kwargs: variables of the template, such as tools, documents, enable_thinking.

        Raises:
            UserError: there is no chat template, or it can't render these messages.
        """
        variables = {**self.special_tokens, **(kwargs or {})}
        template = self._templates.get("default")
        if variables.get("tools"):
            template = self._templates.get("tool_use", template)
        if template is None:
            raise UserError("this model has no chat template; give one with --chat-template, or use completions")
        return template.render(
            messages,
            variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the bos or eos ids that the model wants unless add_special_tokens is off.

        Names of special tokens in the text become those tokens.

        Raises:
            UserError: the text isn't valid Unicode.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"the text holds half a surrogate pair at character {error.start}") from error
            raise
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token give none. Invalid UTF-8 becomes U+FFFD."""
        if not (self._is_byte_level or self._is_byte_fallback):
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        stream = self.text_stream(skip_special_tokens)
        return "".join(map(stream.feed, ids)) + stream.flush()

    def text_stream(self, skip_special_tokens: bool) -> TextStream:
        """A decoder that takes one token at a time."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return Utf8Stream(self.token_bytes, skipped)
        if self._is_byte_fallback:
            return Utf8Stream(self.token_bytes, skipped, ONE_PER_BYTE, self._strips_space)
        return WindowStream(lambda ids: self._backend.decode(ids, skip_special_tokens=False), skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, in the middle of a text; none for an id without a token."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._compute_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        r"""One token for a human: its text, or like "bytes:\xe2\x80" when it isn't whole characters."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _compute_bytes(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token, written as it is
                return token.encode()
        if self._is_byte_fallback:
            token = token.replace(SPACE, " ")
            byte = _byte_of(token)
            return token.encode() if byte is None else byte
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 characters are themselves, the other bytes follow from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


def _byte_of(token: str) -> bytes | None:
    """The byte of a token like <0x0A>; None for other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


def _byte_fallback(decoder: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a decoder is sentencepiece's with byte fallback, and whether it drops a space at the start."""
    steps = [dict(step) for step in decoder.get("decoders", ())]
    fallback = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return steps in (fallback, [*fallback, strip]), steps == [*fallback, strip]


def _read_template(given: str) -> str:
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: {given!r} can't be read: {error}") from error
