"""Tokenizers of Hugging Face directories, read as transformers reads them, without importing it.

The post-processor in tokenizer.json alone says whether bos and eos are added: transformers 5 ignores add_bos_token and
add_eos_token where there is that file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from pagedray.engine.errors import ConfigError
from pagedray.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedray.engine.checkpoint import Checkpoint

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RANK = {name: i for i, name in enumerate(_NAMES)}
_SOURCES = ("*.model", "vocab.*", "*.tiktoken", "tekken.json")  # what transformers can make a tokenizer of


def read_hf_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Raises: ConfigError when there is no tokenizer, or none that can be read."""
    folder = checkpoint.path
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    if (folder / "tokenizer.json").exists():
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"{folder / 'tokenizer.json'} can't be read: {error}") from error
        _add_tokens(backend, config)
        named = {name: token.content for name, token in _named_tokens(config)}
    else:
        backend, named = _convert(folder)
    return Tokenizer(
        backend,
        special_tokens=named,
        eos_ids=[*_eos_ids(checkpoint), *_ids(backend, [named.get("eos_token")])],
        chat_templates=_chat_templates(folder, config),
    )


def _convert(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Let transformers make a tokenizer of other files, such as tokenizer.model. It takes seconds: the last try."""
    if not any(file for pattern in _SOURCES for file in folder.glob(pattern)):
        raise ConfigError(f"{folder} has no tokenizer: no tokenizer.json and none of {', '.join(_SOURCES)}")
    try:
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a missing file, a missing package, an unknown class: it raises all kinds
        raise ConfigError(f"{folder} has no tokenizer.json, and transformers can't make one: {error}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(
            f"{folder} has no tokenizer.json, and its tokenizer {type(converted).__name__} can't be converted to one"
        )
    return backend, dict(converted.special_tokens_map)


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add, or mark as special, what tokenizer_config.json says beyond tokenizer.json."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    changed: dict[str, AddedToken] = {}
    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = _added_token(entry)
        if repr(token) != repr(known.get(token.content)):
            changed[token.content] = token
    for _, token in _named_tokens(config):
        present = changed.get(token.content) or known.get(token.content)
        if present is None or not present.special:
            changed[token.content] = present or token
            changed[token.content].special = True
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    for entry in more if isinstance(more, list) else ():
        token = _added_token(entry, special=True)
        if token.content not in known:
            changed.setdefault(token.content, token)
    backend.add_tokens(list(changed.values()))


def _named_tokens(config: dict[str, Any]) -> Iterator[tuple[str, AddedToken]]:
    """bos_token, eos_token and so on, then the model's own such as image_token: new ones get ids in this order."""
    extra = config.get("extra_special_tokens")
    values = {**config, **(extra if isinstance(extra, dict) else {})}
    for name, value in sorted(values.items(), key=lambda item: _RANK.get(item[0], len(_RANK))):
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value)):
            yield name, _added_token(value, special=True)


def _added_token(value: str | dict[str, Any], special: bool = False) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    flags = {
        key: bool(value[key]) for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in value
    }
    return AddedToken(value["content"], **{"special": special, **flags})


def _ids(backend: tokenizers.Tokenizer, tokens: list[str | None]) -> list[int]:
    ids = [backend.token_to_id(token) for token in tokens if token is not None]
    return [token_id for token_id in ids if token_id is not None]


def _eos_ids(checkpoint: Checkpoint) -> list[int]:
    value = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    return value if isinstance(value, list) else [] if value is None else [value]


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files come before tokenizer_config.json; chat_template.json is where processors used to keep it."""
    files = {path.stem: _read_text(path) for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files["default"] = _read_text(folder / "chat_template.jinja")
    given = files or config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return dict(given)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold a JSON object, it holds {type(value).__name__}")
    return value
