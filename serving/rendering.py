"""A conversation as its model's chat template writes it, with what templates differ in brought into their form."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.parsers.registry import ParserSetup, tool_instructions
from pagedray.serving.parsers.tools import Tool

if TYPE_CHECKING:
    from pagedray.serving.conversation import Conversation

Messages = list[dict[str, Any]]

THINKING_SWITCHES = ("enable_thinking", "thinking")  # Qwen3, SmolLM3 and others; DeepSeek-V3.1, Granite
GPT_OSS_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # it knows low, medium and high
MISTRAL_ID_CHARS = 9  # its templates refuse ids of calls of another length


def render(tokenizer: Tokenizer, setup: ParserSetup, conversation: Conversation) -> str:
    """The prompt's text. Raises UserError for what the template refuses or can't render."""
    messages, kwargs = conversation.messages, _effort(setup, conversation.reasoning_effort)
    if conversation.may_call and tokenizer.template_uses("tools"):
        kwargs["tools"] = [_wire(tool) for tool in conversation.tools]
    elif conversation.may_call:
        role = "system" if "system" in (tokenizer.chat_template or "") or not _checks_roles(tokenizer) else "user"
        messages = _with_instructions(messages, tool_instructions(setup, conversation.tools), role)
    if not _shows_calls(tokenizer):
        messages = [_as_text(message, setup.tool == "hermes") for message in messages]
        if _checks_roles(tokenizer):
            messages = _with_results_of_users(messages)
    if setup.tool is not None and setup.tool.startswith("mistral"):
        messages = [_with_short_ids(message) for message in messages]
    continues = conversation.continue_final_message
    begins = not continues if conversation.add_generation_prompt is None else conversation.add_generation_prompt
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=begins,
        continue_final_message=continues,
        kwargs={**kwargs, **conversation.template_kwargs},
    )


def _effort(setup: ParserSetup, effort: str | None) -> dict[str, Any]:
    """Variables that tell a template how much to reason. To a template that doesn't read them they are nothing."""
    if effort is None:
        return {}
    name = GPT_OSS_EFFORTS.get(effort, effort) if setup.reasoning == "gpt_oss" else effort
    return {"reasoning_effort": name, **dict.fromkeys(THINKING_SWITCHES, effort != "none")}


def _wire(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _with_instructions(messages: Messages, text: str, role: str) -> Messages:
    """Args: `role` is that of the first message, which is made if there is no such one. A system message is joined."""
    if not text:
        return messages
    first = messages[0] if messages else {"role": role, "content": ""}
    if first["role"] not in (role, "system", "developer"):
        return [{"role": role, "content": text}, *messages]
    content = first["content"]
    if isinstance(content, str):
        joined: Any = "\n\n".join(filter(None, [content, text] if first["role"] != "user" else [text, content]))
    else:
        joined = [*(content or ()), {"type": "text", "text": text}]
    return [{**first, "content": joined}, *messages[1:]]


def _checks_roles(tokenizer: Tokenizer) -> bool:
    """Whether the template may refuse messages for their roles, such as Gemma's, which knows users and answers only."""
    return "raise_exception" in (tokenizer.chat_template or "")


def _with_results_of_users(messages: Messages) -> Messages:
    """Results of calls as messages of the user; those of one answer as one, since such templates want turns."""
    out: Messages = []
    joins = False
    for message in messages:
        if message["role"] != "tool":
            out.append(message)
            joins = False
            continue
        content = message["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        text = f"<tool_response>\n{text}\n</tool_response>"
        if joins:
            out[-1] = {"role": "user", "content": f"{out[-1]['content']}\n{text}"}
        else:
            out.append({"role": "user", "content": text})
        joins = True
    return out


def _shows_calls(tokenizer: Tokenizer) -> bool:
    """Whether the template has a place for the calls of earlier answers."""
    return tokenizer.template_uses("tools") or "tool_calls" in (tokenizer.chat_template or "")


def _as_text(message: dict[str, Any], in_tags: bool) -> dict[str, Any]:
    """An answer with its calls in its content: in tags as Hermes has them, or as a JSON list."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    written = [f'{{"name": "{each["name"]}", "arguments": {each["arguments"] or "{}"}}}' for each in functions]
    if in_tags:
        text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    else:
        text = f"[{', '.join(written)}]"
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [content, text]))}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("tool_calls"):
        calls = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _short_id(call_id: str) -> str:
    if len(call_id) == MISTRAL_ID_CHARS and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode()).hexdigest()[:MISTRAL_ID_CHARS]
