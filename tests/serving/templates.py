"""Chat templates for tests, short enough to predict their prompts."""

# Knows tools and writes calls as Hermes and Qwen do.
HERMES = r"""{%- if tools %}{% for tool in tools %}tool {{ tool | tojson }}{{ "\n" }}{% endfor %}{% endif -%}
{%- for message in messages -%}
{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>#{{ call.id }}{% endfor %}
{%- if message.tool_call_id %}@{{ message.tool_call_id }}{% endif %}{{ "\n" }}
{%- endfor -%}
{%- if documents %}{% for document in documents %}doc {{ document.text }}{{ "\n" }}{% endfor %}{% endif -%}
{%- if verbosity %}verbosity {{ verbosity }}{{ "\n" }}{% endif -%}
{%- if add_generation_prompt %}assistant:{% endif -%}"""

# Reasons between tags too, unless told not to, as Qwen3 does.
THINKING = HERMES.replace(
    "{%- for message in messages -%}\n{{ message.role }}:",
    "{%- for message in messages -%}\n{{ message.role }}:"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}",
).replace(
    "assistant:{% endif -%}",
    "assistant:{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>{{ '\\n\\n' }}</think>"
    "{{ '\\n\\n' }}{% endif %}{% endif -%}",
)

# Opens the reasoning itself, as DeepSeek-R1 does.
OPEN_THINKING = HERMES.replace("assistant:{% endif -%}", "assistant:<think>{{ '\\n' }}{% endif -%}")

# Knows users and answers only, in turns, as Gemma 2 does.
TURNS = """{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
{{ message.role }}:{{ message.content }}{{ "\\n" }}
{%- endfor -%}
{%- if add_generation_prompt %}assistant:{% endif -%}"""
