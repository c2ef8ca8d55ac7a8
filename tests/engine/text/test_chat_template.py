"""What transformers renders is the oracle; the rules for messages that templates don't take as they are stand here."""

from __future__ import annotations

import copy

import pytest

from pagedray.engine.errors import ConfigError, Unsupported, UserError
from pagedray.engine.text.chat_template import ChatTemplate
from pagedray.engine.text.tokenizer import Tokenizer
from tests.engine.text import samples

LLAMA2 = """{% if messages[0]['role'] == 'system' %}
{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {% endif %}
  {% if loop.index0 == 0 and system_message != false %}
    {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
  {% else %}
    {% set content = message['content'] %}
  {% endif %}
  {% if message['role'] == 'user' %}
    {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
  {% elif message['role'] == 'assistant' %}
    {{ ' ' + content.strip() + ' ' + eos_token }}
  {% endif %}
{% endfor %}"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson(indent=1) }}{{- '}\\n</tool_call>' }}
            {%- set ns.count = ns.count + 1 %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""
GEMMA = """{{ bos_token }}
{%- for message in messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
PARTS = (
    "{% for m in messages %}{{ m.role | upper }}: "
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}\n{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.role ~ '> ' ~ m.content }}\n{% endif %}{% endfor %}"
)
LOOPS = (
    "{% macro show(m) %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endmacro %}"
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ show(m) }}{{ loop.length }}{{ loop.last }}"
    "{{ '%03d' % loop.index0 }}{{ '{:>4}'.format(loop.index) }}{% endfor %}"
    "{% set block %}{{ messages | map(attribute='role') | join('+') }}{% endset %}{{ block }}"
    "{{ {'a': '<&>é', 'b': [1, none, true]} | tojson }}{{ messages[0].content * 2 }}{{ range(3) | list }}"
)
TEMPLATES = {
    "chatml": samples.CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "qwen": QWEN,
    "gemma": GEMMA,
    "parts": PARTS,
    "marked": MARKED,
    "loops": LOOPS,
}
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

USER = {"role": "user", "content": ' Hi <b>there</b> & "you" '}
ANSWER = {"role": "assistant", "content": "Sure, é\n"}
CHATS = {
    "one": [USER],
    "two": [USER, ANSWER],
    "three": [USER, ANSWER, {"role": "user", "content": ""}],
    "system": [{"role": "system", "content": "Be kind."}, USER, ANSWER],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def backend():
    return samples.byte_level()


def ours(template: str, messages, *, generation=False, final=False, **kwargs) -> str:
    tokenizer = Tokenizer(samples.byte_level(), special_tokens=SPECIAL, chat_templates={"default": template})
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=generation, continue_final_message=final, kwargs=kwargs
    )


def theirs(template: str, messages, *, generation=False, final=False, **kwargs) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=samples.byte_level(), **SPECIAL)
    return tokenizer.apply_chat_template(
        copy.deepcopy(messages),
        chat_template=template,
        tokenize=False,
        add_generation_prompt=generation,
        continue_final_message=final,
        **kwargs,
    )


def as_parts(messages):
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(name, chat, generation):
    messages = CHATS[chat]
    given = as_parts(messages) if name == "parts" else messages
    assert ours(TEMPLATES[name], messages, generation=generation) == theirs(
        TEMPLATES[name], given, generation=generation
    )


@pytest.mark.parametrize(
    "content", ["Sure", " Sure", "Sure ", " \n", "", "a\n\n", "Sure, CONTINUE_FINAL_MESSAGE_TAG x"]
)
@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"loops"}))
def test_continues_the_final_message_as_transformers_does(name, content):
    messages = [USER, {"role": "assistant", "content": content}]
    given = as_parts(messages) if name == "parts" else messages
    text = ours(TEMPLATES[name], messages, final=True)
    assert text == theirs(TEMPLATES[name], given, final=True)
    assert text.rstrip().endswith(content.strip())


@pytest.mark.parametrize("name", ["gemma", "parts"])
def test_continues_the_last_text_part(name):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    messages = [*as_parts([USER]), {"role": "assistant", "content": parts}]
    assert ours(TEMPLATES[name], messages, final=True) == theirs(TEMPLATES[name], messages, final=True)


def test_tools_documents_and_the_callers_variables_reach_the_template():
    assert ours(QWEN, [USER], generation=True, tools=TOOLS) == theirs(QWEN, [USER], generation=True, tools=TOOLS)
    for value in (True, False):
        assert ours(QWEN, [USER], generation=True, enable_thinking=value) == theirs(
            QWEN, [USER], generation=True, enable_thinking=value
        )
    documents = [{"title": "t", "text": "x"}]
    assert ours("{{ documents | tojson }}{{ tools is none }}", [USER], documents=documents) == theirs(
        "{{ documents | tojson }}{{ tools is none }}", [USER], documents=documents
    )


def test_tool_call_arguments_are_parsed_for_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    parsed = {**call, "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
    result = {"role": "tool", "content": "42", "tool_call_id": "1"}
    given = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    before = copy.deepcopy(given)
    want = theirs(QWEN, [USER, {"role": "assistant", "tool_calls": [parsed]}, result])
    assert ours(QWEN, given) == want
    assert given == before
    empty = {**call, "function": {"name": "f", "arguments": ""}}
    assert '"arguments": {}' in ours(QWEN, [USER, {"role": "assistant", "tool_calls": [empty]}])
    broken = {**call, "function": {"name": "f", "arguments": "{"}}
    with pytest.raises(UserError, match=r"messages\[1\].tool_calls\[0\].function.arguments must be JSON"):
        ours(QWEN, [USER, {"role": "assistant", "tool_calls": [broken]}])


def test_parts_become_a_string_for_templates_that_want_one():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ours("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    assert ours("{{ messages[0].content }}|", [{"role": "user", "content": []}]) == "|"


WANTS_PARTS = [
    "{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m.content or [] %}{% for c in content %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set c = m.content if 1 else m.y %}{% for p in c[1:] %}{% endfor %}{% endfor %}",
    "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}{{ show(messages[0].content) }}",
    "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}{{ show(c=messages[0].get('content')) }}",
    "{% macro f(a) %}{{g(a)}}{% endmacro %}{% macro g(b) %}{% for p in b %}{% endfor %}{% endmacro %}{{f(m.content)}}",
]
WANTS_STRING = [
    samples.CHATML,
    QWEN,
    LLAMA2,
    "{% for m in messages %}{% for line in m.content.split('x') %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}{{ m.content }}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("template", [*WANTS_PARTS, *WANTS_STRING])
def test_the_form_of_content_is_read_from_the_template(template):
    source = template + "{{ '<' ~ (messages[0].content is iterable and messages[0].content is not string) ~ '>' }}"
    # the question itself must not count as a test for strings, hence the alias that is not followed
    source = source.replace("messages[0].content is", "messages[0]['con' ~ 'tent'] is")
    text = ours(source, [{"role": "user", "content": [{"type": "text", "text": "x"}]}], m={"content": ""})
    assert text.endswith("<True>" if template in WANTS_PARTS else "<False>")


def test_a_template_that_knows_only_parts_gets_a_string_as_one():
    assert ours(PARTS, [USER]) == f"USER: [{USER['content']}]"
    assert ours(PARTS, [{"role": "user", "content": None}]) == "USER: []"


def test_a_template_that_tests_for_strings_gets_strings():
    asks = "{% set c = messages[0].content %}{% if c is string %}S{% else %}{% for p in c %}P{% endfor %}{% endif %}"
    assert ours(asks, [USER]) == "S"
    assert ours(asks, [{"role": "user", "content": None}]) == "S"
    assert ours(asks, as_parts([USER])) == "P"


def test_null_content_is_an_empty_string_unless_the_template_asks():
    message = {"role": "assistant", "content": None}
    assert ours(samples.CHATML, [message]) == "<|im_start|>assistant\n<|im_end|>\n"
    assert ours(samples.CHATML, [{"role": "assistant"}]) == "<|im_start|>assistant\n<|im_end|>\n"
    asks = "{% for m in messages %}{{ 'null' if m['content'] is none else m['content'] }}{% endfor %}"
    assert ours(asks, [message, USER]) == "null" + USER["content"]


def test_fields_that_are_null_are_left_out():
    answer = {**ANSWER, "tool_calls": None, "refusal": None, "name": None}
    shows = "{% for m in messages %}{{ m.keys() | sort | join(',') }}{% endfor %}"
    assert ours(shows, [answer]) == "content,role"
    assert ours(shows, [{**answer, "tool_calls": [], "name": "x"}]) == "content,name,role"


def test_developer_is_system_for_templates_that_do_not_know_it():
    message = {"role": "developer", "content": "x"}
    assert ours(samples.CHATML, [message]) == "<|im_start|>system\nx<|im_end|>\n"
    knows = "{% for m in messages %}{{ m.role }}{% if m.role in ['developer'] %}!{% endif %}{% endfor %}"
    assert ours(knows, [message]) == "developer!"


def test_the_templates_own_message_reaches_the_client():
    with pytest.raises(UserError, match=r"^Conversation roles must alternate") as caught:
        ours(LLAMA2, [ANSWER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ none() }}",
        "{{ x | nofilter }}",
    ],
)
def test_what_goes_wrong_inside_a_template_is_a_users_error(template):
    with pytest.raises(UserError):
        ours(template, [USER])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": 3, "content": "x"}], "messages[0]"),
        ([USER, {"role": "user", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "content": "", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
def test_malformed_messages_are_named(messages, param):
    with pytest.raises(UserError) as caught:
        ours(samples.CHATML, messages)
    assert caught.value.param == param


def test_parts_that_are_not_text_are_refused_by_name():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(Unsupported, match="image_url"):
        ours(GEMMA, [{"role": "user", "content": [image]}])


def test_one_of_continue_and_generation_prompt_at_a_time():
    with pytest.raises(UserError, match="add_generation_prompt"):
        ours(samples.CHATML, [USER], generation=True, final=True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].role }}", USER),  # content isn't shown at all
        ("{{ messages[0].content[:2] }}", USER),  # only part of it
        ("{{ messages[0].content | upper }}", USER),  # changed, but for the mark
        ("{{ messages[0]['content'] is none }}", {"role": "user", "content": None}),
        ("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", {"role": "user", "content": []}),
    ],
)
def test_a_final_message_that_can_not_be_continued_is_refused(template, message):
    with pytest.raises(UserError) as caught:
        ours(template, [message], final=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message"])
def test_template_kwargs_can_not_replace_fields(name):
    with pytest.raises(UserError, match=name) as caught:
        samples.embedded().apply_chat_template([USER], kwargs={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_template_kwargs_can_replace_special_tokens_as_in_transformers():
    assert ours(LLAMA3, [USER], bos_token="<B>") == theirs(LLAMA3, [USER], bos_token="<B>")


def test_without_a_template_the_error_says_how_to_give_one():
    tokenizer = Tokenizer(samples.byte_level(), special_tokens={})
    with pytest.raises(UserError, match="--chat-template"):
        tokenizer.apply_chat_template([USER])


def test_a_template_with_an_error_is_refused_at_start_or_named_when_used():
    source = "line one\n{% for %}"
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate(source).check()
    with pytest.raises(UserError, match=r"line 2.*--chat-template"):
        ours(source, [USER])


def test_a_template_of_its_own_for_tools():
    templates = {"default": "plain", "tool_use": "tools"}
    tokenizer = Tokenizer(samples.byte_level(), special_tokens={}, chat_templates=templates)
    assert tokenizer.apply_chat_template([USER]) == "plain"
    assert tokenizer.apply_chat_template([USER], kwargs={"tools": TOOLS}) == "tools"
    assert tokenizer.apply_chat_template([USER], kwargs={"tools": []}) == "plain"
