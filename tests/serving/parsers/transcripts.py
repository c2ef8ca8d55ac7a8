"""Outputs of each family, and what they mean. White space beside markup isn't part of the meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedray.serving.parsers.events import ContentText, Event, OutputParser, ReasoningText, ToolArguments, ToolStart
from pagedray.serving.parsers.registry import ParserSetup, make_parser
from pagedray.serving.parsers.tools import Tool

TOOLS = (
    Tool(
        "get_weather",
        "Weather of a place",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": ["array", "null"]}},
            "required": ["city"],
        },
    ),
    Tool("now"),
    Tool("web.search-all", "", {"type": "object", "properties": {"query": {"type": "string"}, "deep": {}}}),
)


@dataclass
class Meaning:
    """All events of an output, joined."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Transcript:
    """An output and its meaning. The arguments of each call are the exact text."""

    tool: str | None
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    reasoning_parser: str | None = None
    is_open: bool = False
    special: tuple[str, ...] = ()

    def parser(self) -> OutputParser:
        return make_parser(
            ParserSetup(self.tool, self.reasoning_parser),
            TOOLS,
            choice="auto",
            reasoning_is_open=self.is_open,
            special_tokens=self.special,
        )

    @property
    def meaning(self) -> Meaning:
        return Meaning(self.content, self.reasoning, self.calls)


def meaning_of(events: list[Event]) -> Meaning:
    """Joins events, and checks what holds for any output."""
    meaning = Meaning()
    names: list[str] = []
    arguments: list[str] = []
    ids: set[str] = set()
    for event in events:
        match event:
            case ContentText(text=text):
                assert text
                meaning.content += text
            case ReasoningText(text=text):
                assert text
                meaning.reasoning += text
            case ToolStart(index=index, id=call_id, name=name):
                assert index == len(names) and call_id not in ids
                assert call_id.startswith("call_") and len(call_id) == 29 and int(call_id[5:], 16) >= 0
                ids.add(call_id)
                names.append(name)
                arguments.append("")
            case ToolArguments(index=index, text=text):
                assert text and index == len(names) - 1
                arguments[index] += text
    meaning.calls = tuple(zip(names, arguments, strict=True))
    return meaning


def parse(parser: OutputParser, pieces: Any) -> Meaning:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return meaning_of(events + parser.finish())


# JSON that a careless reader of brackets, quotes or tags gets wrong.
HARD = (
    '{"city": "Zürich \\"}{\\" </tool_call> \\\\", "at": [1, {"a": "]}"}, null], "days": 3e0, "é😀": "\\ud83d\\ude00"}'
)


def deepseek(*calls: tuple[str, str], fenced: bool) -> str:
    shown = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{given}\n```<｜tool▁call▁end｜>"
        if fenced
        else f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return "<｜tool▁calls▁begin｜>" + ("\n" if fenced else "").join(shown) + "<｜tool▁calls▁end｜>"


HERMES = [
    Transcript(
        "hermes", "Plain text, a < b, <b>bold</b> and <tool_box>.", "Plain text, a < b, <b>bold</b> and <tool_box>."
    ),
    Transcript("hermes", "  ends with <tool", "  ends with <tool"),
    Transcript("hermes", " \n ", " \n "),
    Transcript("hermes", "x </tool_call> y", "x </tool_call> y"),
    Transcript(
        "hermes",
        f'Let me look.\n<tool_call>\n{{"name": "get_weather", "arguments": {HARD}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Let me look.",
        (("get_weather", HARD), ("now", "{}")),
    ),
    Transcript(
        "hermes",
        '<tool_call>{"arguments": {"a": {}}, "name": "now"}</tool_call> and then\n\n'
        '<tool_call>{"name":"now"}</tool_call>\n',
        "and then",
        (("now", '{"a": {}}'), ("now", "{}")),
    ),
    Transcript(
        "hermes",
        'One\n\n<tool_call>{"name": "now", "arguments": null, "id": [1]}</tool_call>\ntwo <tool_call>{"id":{"x":"}"},'
        '"name": "other", "parameters": {"q":1}}</tool_call>.',
        "One\n\ntwo .",
        (("now", "{}"), ("other", '{"q":1}')),
    ),
    # Generously: several in one pair of tags, a brace too many, tags that aren't closed.
    Transcript(
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {"b":2}}}\n</tool_call>',
        "",
        (("now", "{}"), ("now", '{"b":2}')),
    ),
    Transcript(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now", "arguments": {"c":1}</tool_call> done',
        "done",
        (("now", "{}"), ("now", '{"c":1}')),
    ),
    Transcript("hermes", '<tool_call>{"name": "now", "arguments": {}} So.', "So.", (("now", "{}"),)),
    # An object in a string, as some models write arguments.
    Transcript(
        "hermes",
        r'<tool_call>{"name": "now", "arguments": "{\"a\": \"\\u00e9 \u00fc \ud83d\ude00 \ud83d \\n\"}"}</tool_call>',
        "",
        (("now", '{"a": "\\u00e9 ü 😀 \ufffd \\n"}'),),
    ),
    Transcript("hermes", '<tool_call>{"name": "now", "arguments": " "}</tool_call>', "", (("now", "{}"),)),
    # Not calls: they stay as they are.
    *[
        Transcript("hermes", f"Say {text} so", f"Say {text} so")
        for text in (
            '<tool_call>{"nam": "now"}</tool_call>',
            '<tool_call>{"name": ["now"], "arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "now", "arguments": "text"}</tool_call>',
            "<tool_call>\n now() </tool_call>",
            "<tool_call>{}</tool_call>",
            '<tool_call>{"name" "now"}</tool_call>',
            '<tool_call>{"name": "now" "arguments": 5}</tool_call>',
            f'<tool_call>{{"{"k" * 80}": 1}}</tool_call>',
            '<tool_call>{"name": "a\\qb"}</tool_call>',
        )
    ],
    # What isn't JSON behind the name goes out as it is, to where its brackets close or the tag comes.
    Transcript(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {\'a\': tru, ]}}</tool_call> ok',
        "ok",
        (("now", "{'a': tru, ]}"),),
    ),
    Transcript(
        "hermes", '<tool_call>{"name": "now", "arguments": {"a": [1}}</tool_call> ok', "ok", (("now", '{"a": [1}}'),)
    ),
]

LLAMA = [
    Transcript("llama3_json", '{"name": "get_weather", "parameters": ' + HARD + "}", "", (("get_weather", HARD),)),
    Transcript(
        "llama3_json",
        ' {"name": "now", "parameters": {}}; {"type": "function", "name": "now", "parameters": {"a":1}}\n'
        '{"name": "now", "arguments": {"b": [2]}}',
        "",
        (("now", "{}"), ("now", '{"a":1}'), ("now", '{"b": [2]}')),
    ),
    Transcript(
        "llama3_json",
        '<|python_tag|>{"name": "other", "parameters": {"x": "y"}}<|eom_id|>',
        "",
        (("other", '{"x": "y"}'),),
        special=("<|eom_id|>", "<|python_tag|>"),
    ),
    Transcript("llama3_json", 'Sure:\n{"name": "now", "parameters": {}}\nDone.', "Sure:\nDone.", (("now", "{}"),)),
    # JSON that is the answer.
    *[
        Transcript("llama3_json", text, text)
        for text in (
            '{"name": "Bob", "parameters": {"age": 3}}',
            '{"name": "now", "age": 3}',
            '{"name": "now"}',
            '{"people": [\n{"name": "now", "parameters": {}}\n]}',
            '{"id": 7, "of": {"name": "now", "parameters": {}}}',
            "if (a < b) {\n  x();\n}",
            '{"name": "now", "parameters": 5}; ok',
            "<|python_tag|>print(1)",
        )
    ],
    Transcript("llama3_json", '{"name": "now", "parameters": {}}; and', "; and", (("now", "{}"),)),
]

MISTRAL = [
    Transcript(
        tool,
        'Hm. [TOOL_CALLS] [{"name": "get_weather", "arguments": ' + HARD + '}, {"arguments": {}, "name": "now"}]',
        "Hm.",
        (("get_weather", HARD), ("now", "{}")),
    )
    for tool in ("mistral", "mistral_args")
] + [
    Transcript(
        "mistral_args",
        f"[TOOL_CALLS]get_weather[ARGS]{HARD}[TOOL_CALLS]now[CALL_ID]a1-B[ARGS]{{}}</s>",
        "",
        (("get_weather", HARD), ("now", "{}")),
        special=("</s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    Transcript("mistral", '[TOOL_CALLS]now{"a": 1} bye', "bye", (("now", '{"a": 1}'),)),
    Transcript("mistral", '[TOOL_CALLS] {"name": "now", "arguments": {}}', "", (("now", "{}"),)),
    Transcript(
        "mistral",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": 5}] x',
        ', {"name": 5}] x',
        (("now", "{}"),),
    ),
    *[
        Transcript("mistral", text, text)
        for text in (
            "see [1] and [TOOL",
            "[TOOL_CALLS] nothing",
            "[TOOL_CALLS][1, 2]",
            "[TOOL_CALLS]",
            "[TOOL_CALLS]f[ARGS]x",
        )
    ],
]

PYTHONIC = [
    Transcript(
        "pythonic",
        '[get_weather(city="a\'s \\"b\\" ] ) \\u00e9", days=-3, at=[1, {"x": (True, None)}, \'}\']), now()]',
        "",
        (
            ("get_weather", '{"city": "a\'s \\"b\\" ] ) é", "days": -3, "at": [1, {"x": [true, null]}, "}"]}'),
            ("now", "{}"),
        ),
    ),
    Transcript(
        "pythonic",
        '<|python_start|>[web.search-all(query="""two\n"lines\\"""", deep=false)]<|python_end|>',
        "",
        (("web.search-all", '{"query": "two\\n\\"lines\\"", "deep": false}'),),
        special=("<|python_start|>", "<|python_end|>", "<|eot|>"),
    ),
    Transcript(
        "pythonic",
        "[get_weather('Paris', 2), now(a=b + 1, c=f(1, 2), **{'d': 1.5}, )]\nDone [now()]",
        "Done [now()]",
        (("get_weather", '{"city": "Paris", "days": 2}'), ("now", '{"a": "b + 1", "c": "f(1, 2)", "d": 1.5}')),
    ),
    Transcript(
        "pythonic",
        "I will.\n[now(big=1e999, s='\\ud83d\\ude00\\ud83d')]",
        "I will.",
        (("now", '{"big": "1e999", "s": "😀\ufffd"}'),),
    ),
    *[
        Transcript("pythonic", text, text)
        for text in ("[1, 2, now()]", "[other(a=1)]", "[now]", "now()", "see [now()]", "[", "[now() + 1]"[:4])
    ],
    Transcript("pythonic", "[now() + 1]", "+ 1]", (("now", "{}"),)),
]

DEEPSEEK = [
    Transcript(
        tool,
        "I look.\n" + deepseek(("get_weather", HARD), ("now", "{}"), fenced=fenced) + "<｜end▁of▁sentence｜>",
        "I look.",
        (("get_weather", HARD), ("now", "{}")),
        special=("<｜end▁of▁sentence｜>", "<｜tool▁sep｜>"),
    )
    for tool in ("deepseek_v3", "deepseek_v31")
    for fenced in (True, False)
] + [
    Transcript(
        "deepseek_v3",
        deepseek(("now", '{"a": "\\n```\\n"}'), fenced=True) + " more",
        "more",
        (("now", '{"a": "\\n```\\n"}'),),
    ),
    *[
        Transcript("deepseek_v31", text, text)
        for text in (
            "<｜tool▁calls▁begin｜>now",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>[]<｜tool▁call▁end｜>",
            "a <｜b",
        )
    ],
]

QWEN_CODER = [
    Transcript(
        "qwen3_coder",
        'Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n<b>"Zürich" 😀\n\nx\n\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=at>\n[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Hm.",
        (
            ("get_weather", '{"city": "<b>\\"Zürich\\" 😀\\n\\nx\\n", "days": 3, "at": [1, {"a": null}]}'),
            ("now", "{}"),
        ),
    ),
    Transcript(
        "qwen3_coder",
        "<function=other><parameter=a>1</parameter><parameter=b>NaN</parameter><parameter=c>True</parameter></function>ok",
        "ok",
        (("other", '{"a": 1, "b": "NaN", "c": true}'),),
    ),
    Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>5</parameter>\n</tool_call> after",
        "after",
        (("get_weather", '{"city": "5"}'),),
    ),
    *[
        Transcript("qwen3_coder", text, text)
        for text in ("<tool_call>\nnow</tool_call>", "<function=>", "<function=a b>", "a </tool_call>", "<funct")
    ],
]

_START = "<|start|>assistant"
GPT_OSS = [
    Transcript(
        "gpt_oss",
        "<|channel|>analysis<|message|>I think < it.<|end|>"
        + _START
        + "<|channel|>analysis<|message|>More.<|end|>"
        + _START
        + "<|channel|>commentary<|message|>Let me see.<|end|>"
        + _START
        + f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{HARD}<|call|>"
        + _START
        + " to=functions.now<|channel|>commentary json<|message|><|call|>",
        "Let me see.",
        (("get_weather", HARD), ("now", "{}")),
        "I think < it.\n\nMore.",
        "gpt_oss",
        special=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|endoftext|>"),
    ),
    Transcript(
        "gpt_oss",
        "<|channel|>commentary<|message|>First.<|end|>"
        + _START
        + "<|channel|>final<|message|>\nHello,\n <|x|> you <|return|>",
        "First.\n\nHello,\n <|x|> you",
        reasoning_parser="gpt_oss",
    ),
    Transcript(
        "gpt_oss", "<|channel|>analysis<|message|>hm<|end|>" + _START + "<|channel|>final<|message|>Hi", "hm\n\nHi"
    ),
    Transcript("gpt_oss", "No channel at all, a <b> <|", "No channel at all, a <b> <|", reasoning_parser="gpt_oss"),
    Transcript(
        None,
        " to=functions.now<|channel|>commentary<|message|>{}<|call|>",
        "{}",
        reasoning_parser="gpt_oss",
    ),
]

JSON = [
    Transcript(
        "json",
        '[{"name": "get_weather", "arguments": ' + HARD + '}, {"name": "now", "parameters": {}}]',
        "",
        (("get_weather", HARD), ("now", "{}")),
    ),
    Transcript("json", 'Yes:\n{"name": "now", "arguments": {}}', "Yes:", (("now", "{}"),)),
    Transcript(
        "json",
        'So:\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "other"}</tool_call>',
        "So:",
        (("now", "{}"), ("other", "{}")),
    ),
    *[
        Transcript("json", text, text)
        for text in (
            "[1, 2]",
            '[{"name": "Bob", "arguments": {}}]',
            "[]",
            '{"a": [\n{"name": "now", "arguments": {}}]}',
        )
    ],
]

THINK = [
    Transcript(
        "hermes",
        '<think>\nHm, <tool_call> or </thin?\n</think>\n\nSo:\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "So:",
        (("now", "{}"),),
        "Hm, <tool_call> or </thin?",
        "qwen3",
    ),
    Transcript("hermes", "<think>\n\n</think>\n\nHi", "Hi", reasoning_parser="qwen3"),
    Transcript("hermes", " Hi <think> there</think> ", " Hi <think> there</think> ", reasoning_parser="qwen3"),
    Transcript("hermes", "<thi", "<thi", reasoning_parser="qwen3"),
    Transcript("hermes", "on and on </thi", "", (), "on and on </thi", "qwen3", True),
    Transcript(None, "so\n</think>\n\n Yes. \n", "Yes. \n", (), "so", "deepseek_r1", True),
    Transcript(None, "<think>so</think>Yes", "Yes", (), "so", "deepseek_r1", True),
    Transcript(None, "Yes \n", "Yes \n", (), "", "deepseek_r1"),
]

TRANSCRIPTS = [*HERMES, *LLAMA, *MISTRAL, *PYTHONIC, *DEEPSEEK, *QWEN_CODER, *GPT_OSS, *JSON, *THINK]
