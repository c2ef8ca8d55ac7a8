from __future__ import annotations

import time

import pytest
from jinja2.exceptions import SecurityError, UndefinedError

from pagedray.engine.text import template_sandbox
from pagedray.engine.text.template_sandbox import MAX_STEPS, MAX_WIDTH, TemplateSandbox


def render(source: str, **variables) -> str:
    sandbox = TemplateSandbox()
    return sandbox.run(sandbox.compile_template(sandbox.parse(source)), variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ [1] | map(attribute='__class__') | list }}",
        "{{ self._TemplateReference__context }}",
        "{{ x.append(1) }}",
        "{{ x | attr('__class__') }}",
        "{{ 'a'.translate({97: 'b'}) }}",
    ],
)
def test_python_is_out_of_reach(source):
    values = [1]
    try:
        text = render(source, x=values)
    except (SecurityError, UndefinedError):
        text = ""
    assert text in ("", "[Undefined]")
    assert values == [1]


DOUBLE = "{% set ns = namespace(x='0123456789') %}{% for _ in range(40) %}{% set ns.x = EXPR %}{% endfor %}{{ ns.x }}"
ENDLESS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text made up": "{{ lipsum() }}",
    "a large range": "{% for a in range(10**9) %}{% endfor %}",
    "nested loops over a generator": "{% for a in x|map('int') %}{% for b in x|map('int') %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}"
    ),
    "a loop that calls itself": "{% for a in [x] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "output": "{% for a in range(9999) %}{{ y }}{% endfor %}",
    "a product": "{{ 'x' * 10**10 }}",
    "a product the other way": "{{ 10**10 * [1] }}",
    "a power": "{{ 9**9999999 }}",
    "a product of numbers": DOUBLE.replace("'0123456789'", "9").replace("EXPR", "ns.x * ns.x"),
    "a format": "{{ '%9999999999d' % 1 }}",
    "a format with a width": "{{ '%*d' % (10**10, 1) }}",
    "a str.format": "{{ '{:{w}}'.format(1, w=10**10) }}",
    "a width in a str.format": "{{ '{:99999999999}'.format(1) }}",
    "the format filter": "{{ '%99999999999d' | format(1) }}",
    "a method": "{{ 'x'.ljust(10**10) }}",
    "rows": "{{ [1] | batch(10**10, 0) | list }}",
    "an indent": "{{ [[1]] | tojson(indent=10**10) }}",
    "a filter": "{{ 'x' | center(width=10**10) }}",
    "replace": "{{ (y * 100).replace('x', y * 100) }}",
    "the replace filter": "{{ (y * 100) | replace('x', y * 100) }}",
    "join": "{{ y.join([y * 100] * 10**6) }}",
    "the join filter": "{{ ([y * 100] * 10**6) | join(y) }}",
    "the join filter's separators": "{{ range(99999) | list | join(y * 100) }}",
    "sums": DOUBLE.replace("EXPR", "ns.x + ns.x"),
    "concatenations": DOUBLE.replace("EXPR", "ns.x ~ ns.x"),
    "set blocks": DOUBLE.replace("{% set ns.x = EXPR %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_nothing_grows_or_goes_on_for_ever(name, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SIZE", 2**22)
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 50_000)
    with pytest.raises((SecurityError, OverflowError, RecursionError, UndefinedError)):
        render(ENDLESS[name], x=list(range(9999)), y="x" * 2 * 10**4)


def test_each_render_has_its_own_steps():
    sandbox = TemplateSandbox()
    template = sandbox.compile_template(
        sandbox.parse("{% for a in range(99) %}{% for b in x %}{% endfor %}{% endfor %}")
    )
    for _ in range(3):
        assert sandbox.run(template, {"x": range(MAX_STEPS // 200)}) == ""


def test_ordinary_templates_are_not_bounded():
    assert render("{{ x | length }}{{ 12345678 + 1 }}{{ x.count(1) }}", x=[1] * 10**6) == f"{10**6}12345679{10**6}"
    assert render("{% for a in range(20000) if a % 9999 == 0 %}{{ a }},{% endfor %}") == "0,9999,19998,"
    assert (
        render("{{ 'ab' | center(6) }}|{{ 'a,b'.split(',', 1) | join('-') }}|{{ '%5.1f' % 2 }}") == "  ab  |a-b|  2.0"
    )
    assert len(render("{{ 'x'.ljust(n) }}", n=MAX_WIDTH)) == MAX_WIDTH


def test_numbers_that_are_no_widths_may_be_large():
    text = "{{ namespace(x=99999).x }} {{ '{} {:,}'.format(99999, 99999) }} {{ y | default(99999) }} {{ '%d' % 99999 }}"
    assert render(text) == "99999 99999 99,999 99999 99999"
    assert render("{% macro m(n) %}{{ n }}{% endmacro %}{{ m(n=99999) }}{{ 'abc' | truncate(99999) }}") == "99999abc"


def test_a_generation_block_shows_its_body_and_hides_its_variables():
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}[{{ x }}]{% endgeneration %}{{ x }}"
    assert render(source) == "[2]1"


def test_blocks_take_their_line_with_them():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


def test_json_is_left_as_it_is():
    assert render("{{ x | tojson }}", x={"é": "<&'>"}) == '{"é": "<&\'>"}'
    assert render("{{ x | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}", x={"b": 1, "a": "é"}) == (
        '{\n  "a": "\\u00e9",\n  "b": 1\n}'
    )


def test_the_date_is_todays():
    before = time.strftime("%d %b %Y")
    text = render("{{ strftime_now('%d %b %Y') }}")
    assert text in (before, time.strftime("%d %b %Y"))
