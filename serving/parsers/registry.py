"""Which parsers there are, which a model needs, and all that depends on how its family writes calls and reasoning."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pagedray.engine.config import ApiConfig
from pagedray.engine.errors import ConfigError
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.messages import ReasoningSpan
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.parsers import think
from pagedray.serving.parsers.events import OutputParser
from pagedray.serving.parsers.family import Format, ToolFamily
from pagedray.serving.parsers.reader import Steps, TextReader
from pagedray.serving.parsers.text_parser import TextParser
from pagedray.serving.parsers.tool_formats import const, either, optional, sequence
from pagedray.serving.parsers.tools import NamedTool, Tool, ToolChoice
from pagedray.serving.parsers.writer import EventWriter

# Name → module and the name of its family. Detection takes the first that a template matches.
TOOL_PARSERS: Mapping[str, tuple[str, str]] = {
    "gpt_oss": ("gpt_oss", "FAMILY"),
    "deepseek_v3": ("deepseek_v3", "FENCED"),
    "deepseek_v31": ("deepseek_v3", "BARE"),
    "mistral_args": ("mistral", "NAMED"),
    "mistral": ("mistral", "LISTED"),
    "qwen3_coder": ("qwen3_coder", "FAMILY"),
    "hermes": ("hermes", "FAMILY"),
    "pythonic": ("pythonic", "FAMILY"),
    "llama3_json": ("llama3_json", "FAMILY"),
    "json": ("plain_json", "FAMILY"),
}
REASONING_PARSERS = ("deepseek_r1", "qwen3", "gpt_oss")
DEFAULT_TOOL_PARSER = "json"  # a list ends where its bracket closes, which models know that were never taught to call
_AUTO, _OFF = "auto", "none"
_DEEPSEEK_TURN = "<｜Assistant｜>"


@dataclass(frozen=True)
class ParserSetup:
    """Names of the parsers of a model; None: none."""

    tool: str | None
    reasoning: str | None


def choose_parsers(config: ApiConfig, chat_template: str | None) -> ParserSetup:
    """The parsers that the configuration names, or those that fit the model's chat template.

    Raises:
        ConfigError: a name isn't known, or gpt_oss is used for one of the two and something else for the other.
    """
    template = chat_template or ""
    tool = _choose("tool_call_parser", config.tool_call_parser, TOOL_PARSERS, _tool_parser_of, template)
    reasoning = _choose("reasoning_parser", config.reasoning_parser, REASONING_PARSERS, _reasoning_parser_of, template)
    if reasoning is not None and tool is not None and (reasoning == "gpt_oss") != (tool == "gpt_oss"):
        raise ConfigError(
            f"tool_call_parser {tool} and reasoning_parser {reasoning} don't go together: gpt_oss reads reasoning and "
            "calls from the same channels; set both to gpt_oss or one of them to none"
        )
    return ParserSetup(tool, reasoning)


def needs_special_tokens(setup: ParserSetup) -> bool:
    """Whether the parsers read special tokens: text must then come with them, and `make_parser` be told which exist."""
    return bool(_markup(setup))


def make_parser(
    setup: ParserSetup,
    tools: Sequence[Tool],
    *,
    choice: ToolChoice,
    reasoning_is_open: bool,
    special_tokens: Sequence[str],
) -> OutputParser:
    """A parser for one choice of one request.

    A call of a tool that wasn't offered is passed on where markup shows that it is a call: agents answer it with an
    error that the model understands. Formats without markup (json, llama3_json, pythonic) take only the names of
    `tools` for calls, so that an answer that is JSON stays an answer.

    Where a call must come, other text is dropped: it begins a call that was cut off, or stands behind calls.

    Args:
        tools: what the request offers; without any, or with the choice none, what looks like a call is content.
        reasoning_is_open: whether the prompt ends within reasoning (`reasoning_is_open`).
        special_tokens: texts of special tokens to drop, but for those that are markup. All of the tokenizer's where
            text comes with them because of `needs_special_tokens`; none where a client wants to see them.
    """
    has_tools = setup.tool is not None and bool(tools) and choice != "none"
    family = find_family(setup.tool) if has_tools and setup.tool is not None else None

    def read(reader: TextReader, out: EventWriter) -> Steps[None]:
        out.drops_content = has_tools and choice != "auto"
        if setup.reasoning == "gpt_oss" or (setup.tool == "gpt_oss" and has_tools):
            from pagedray.serving.parsers.gpt_oss import read_channels

            has_reasoning = setup.reasoning is not None
            yield from read_channels(reader, out, has_reasoning=has_reasoning, has_tools=has_tools)
            return
        if setup.reasoning is not None:
            yield from think.read_think(reader, out, reasoning_is_open)
        if family is not None:
            yield from family.read(reader, out, tools)
        else:
            out.can_have_calls = False
            yield from reader.rest(out.content)

    kept = _markup(setup) if has_tools or setup.reasoning == "gpt_oss" else ()
    return TextParser(read, [token for token in special_tokens if token not in kept])


def reasoning_is_open(setup: ParserSetup, prompt: str, *, continues: bool = False) -> bool:
    """Whether a prompt ends within reasoning, so that the output goes on with it.

    Args:
        prompt: as the chat template rendered it.
        continues: it ends with a message of the assistant that the output goes on with.
    """
    if setup.reasoning is None or setup.reasoning == "gpt_oss":
        return False
    if continues:
        return prompt.rfind(think.BEGIN) > prompt.rfind(think.END)
    prompt = prompt.rstrip()
    # DeepSeek-R1 reasons even where neither its template nor itself writes the tag.
    return prompt.endswith(think.BEGIN) or (setup.reasoning == "deepseek_r1" and not prompt.endswith(think.END))


def reasoning_span(
    setup: ParserSetup, prompt: str, tokenizer: Tokenizer, max_tokens: int | None, *, continues: bool = False
) -> ReasoningSpan | None:
    """Where the model reasons, for the worker; None: it doesn't.

    Args:
        prompt: as the chat template rendered it.
        max_tokens: budget of reasoning; what closes it is forced then.
        continues: see `reasoning_is_open`.
    """
    if setup.reasoning is None:
        return None
    begin, end = think.BEGIN, think.END
    if setup.reasoning == "gpt_oss":
        from pagedray.serving.parsers.gpt_oss import REASONING_BEGIN, REASONING_END

        begin, end = REASONING_BEGIN, REASONING_END
    is_open = reasoning_is_open(setup, prompt, continues=continues)
    if not is_open and setup.reasoning != "gpt_oss" and (continues or prompt.rstrip().endswith(end)):
        return None
    end_ids = tuple(tokenizer.encode(end, add_special_tokens=False))
    return ReasoningSpan(
        begin=begin.encode(), end=end.encode(), end_ids=end_ids, is_open=is_open, max_tokens=max_tokens
    )


def tool_grammar(
    setup: ParserSetup,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
) -> GrammarSource | None:
    """What an output with calls may be, in the family's own form. None: anything.

    required: one call or more, of one call exactly without `parallel`. A named tool: one call of it. auto: free text,
    in which calls follow the schemas of strict tools, if there are any; those of others have any object.
    """
    if setup.tool is None or not tools or choice == "none":
        return None
    family = find_family(setup.tool)
    if isinstance(choice, NamedTool):
        made = family.calls([tool for tool in tools if tool.name == choice.name], False)
    elif choice == "required":
        made = family.calls(tools, parallel)
        if parallel and family.trailer is not None:
            made = sequence(made, optional(family.trailer))
    elif any(tool.strict for tool in tools):
        loose = [tool if tool.strict else msgspec.structs.replace(tool, parameters={}) for tool in tools]
        made = family.text_with_calls(loose, parallel)
    else:
        return None
    return _structural_tag(made, "tools")


def answer_grammar(setup: ParserSetup, source: GrammarSource) -> GrammarSource:
    """The grammar of an output whose content follows `source`: the same, but where content stands within markup."""
    if setup.reasoning != "gpt_oss" and setup.tool != "gpt_oss":
        return source
    from pagedray.serving.parsers.gpt_oss import final_message

    return _structural_tag(final_message(_as_format(source)), source.param)


def answer_or_calls(
    setup: ParserSetup,
    tools: Sequence[Tool],
    parallel: bool,
    source: GrammarSource,
) -> GrammarSource:
    """An output that is either an answer whose content follows `source`, or calls and nothing else.

    For the choice auto. Calls follow the schemas of strict tools; those of others have any object.

    Args:
        parallel: there may be several calls.
    """
    if setup.tool is None or not tools:
        return answer_grammar(setup, source)
    answer = _as_format(source)
    if setup.tool == "gpt_oss":
        from pagedray.serving.parsers.gpt_oss import final_message

        answer = final_message(answer)
    loose = [tool if tool.strict else msgspec.structs.replace(tool, parameters={}) for tool in tools]
    made = either([answer, find_family(setup.tool).calls(loose, parallel)])
    return _structural_tag(made, source.param)


def tool_instructions(setup: ParserSetup, tools: Sequence[Tool]) -> str:
    """Text of a system message that offers tools, for chat templates that don't know them."""
    if setup.tool is None or not tools:
        return ""
    lines = [
        json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}, ensure_ascii=False
        )
        for tool in tools
    ]
    return "\n".join(
        [
            "You can call functions. Each line describes one, with the JSON schema of its arguments:",
            *lines,
            find_family(setup.tool).how_to_call,
            "Results come back as messages with the role tool. Call a function only if it helps.",
        ]
    )


def find_family(name: str) -> ToolFamily:
    """The family of a tool parser's name, imported when it is first needed."""
    module, attribute = TOOL_PARSERS[name]
    family = getattr(importlib.import_module(f"pagedray.serving.parsers.{module}"), attribute)
    assert isinstance(family, ToolFamily)
    return family


def _markup(setup: ParserSetup) -> tuple[str, ...]:
    """Special tokens that the parsers read."""
    names = {name for name in (setup.tool, "gpt_oss" if setup.reasoning == "gpt_oss" else None) if name is not None}
    return tuple(token for name in sorted(names) for token in find_family(name).markup)


def _choose(
    setting: str, given: str, known: Iterable[str], detect: Callable[[str], str | None], template: str
) -> str | None:
    if given == _AUTO:
        return detect(template)
    if given == _OFF:
        return None
    if given not in known:
        raise ConfigError(f"{setting} {given!r} is unknown; use {_AUTO}, {_OFF}, {', '.join(known)}")
    return given


def _tool_parser_of(template: str) -> str:
    return next((name for name in TOOL_PARSERS if find_family(name).is_used_by(template)), DEFAULT_TOOL_PARSER)


def _reasoning_parser_of(template: str) -> str | None:
    if find_family("gpt_oss").is_used_by(template):
        return "gpt_oss"
    if think.BEGIN not in template and think.END not in template:
        return None
    return "deepseek_r1" if _DEEPSEEK_TURN in template else "qwen3"


def _structural_tag(made: Format, param: str) -> GrammarSource:
    text = json.dumps({"type": "structural_tag", "format": made}, ensure_ascii=False)
    return GrammarSource("structural_tag", text, param)


def _as_format(source: GrammarSource) -> Format:
    match source.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(source.text)}
        case "regex":
            return {"type": "regex", "pattern": source.text}
        case "choice":
            return either([const(text) for text in json.loads(source.text)])
        case "ebnf":
            return {"type": "grammar", "grammar": source.text}
        case "structural_tag":
            made: Format = json.loads(source.text)
            return made["format"] if made.get("type") == "structural_tag" else made
