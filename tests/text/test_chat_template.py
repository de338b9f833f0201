"""Chat templates: equal to transformers on the styles in use, and safe on those that are not meant well."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from maitred.core.errors import CheckpointError, InvalidRequest, UnsupportedContent
from maitred.text.chat_template import ChatTemplate
from tests.text.kinds import NAMED, byte_level
from tests.waiting import joined

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Today: ' ~ date_string ~ '\\n\\n' ~ system_message ~ '<|eot_id|>' }}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"""
GEMMA = """\
{{ bos_token }}
{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<start_of_turn>model\\n'}}
{% endif %}
"""
REASONING = """\
{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}
{% if loop.index0 > 50 %}{% break %}{% endif %}
{% generation %}{{ m.role }}:{% if m.reasoning_content and loop.index0 > ns.last %}\
<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endgeneration %}

{% if not loop.last %}{% continue %}{% endif %}
{% endfor %}
{% macro end(x) %}[{{ x }}]{% endmacro %}{{ end('a' ~ 1 ~ messages|length) }}{{ dict(a=1)|tojson }}{{ 'é<&>'|tojson }}
{{ [1, 2] + [3] }}{{ '%s-%03d' % ('x', 7) }}{{ '{:>5}'.format('y') }}{{ 2 ** 10 }}{{ 7 // 2 }}
{{ messages|map(attribute='role')|join(',') }}
"""
TEMPLATES = {"chatml": CHATML, "llama_3": LLAMA_3, "mistral": MISTRAL, "gemma": GEMMA, "reasoning": REASONING}
USER = {"role": "user", "content": "  Hello, <b>wörld</b> 👋 "}
ASSISTANT = {"role": "assistant", "content": "Hi there. "}
SYSTEM = {"role": "system", "content": "Be kind."}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER],
    [USER, USER],
    [ASSISTANT],
    [USER, {**ASSISTANT, "reasoning": "Hm."}],
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level()._inner, **NAMED)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: "+".join(m["role"] for m in chat))
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 Jan"},
        {"add_generation_prompt": True, "tools": [{"type": "function", "function": {"name": "f", "x": "é"}}]},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids="-".join,
)
def test_the_prompt_equals_that_of_transformers(theirs, name, chat, options):
    template = ChatTemplate(TEMPLATES[name], NAMED)
    try:
        expected = theirs.apply_chat_template(chat, chat_template=TEMPLATES[name], tokenize=False, **options)
    except Exception:  # a role order the template refuses
        with pytest.raises(InvalidRequest):
            template.render(chat, **options)
    else:
        assert template.render(chat, **options) == expected


def test_messages_that_the_template_refuses_or_cannot_use_are_the_clients_fault():
    with pytest.raises(InvalidRequest, match="Conversation roles must alternate") as refused:
        ChatTemplate(MISTRAL, NAMED).render([USER, USER])
    assert refused.value.param == "messages"
    with pytest.raises(InvalidRequest, match="System role not supported"):
        ChatTemplate(GEMMA, NAMED).render([SYSTEM, USER])

    with pytest.raises(InvalidRequest, match="cannot render these messages: TypeError"):
        ChatTemplate(CHATML).render([{"role": "user", "content": None}])
    with pytest.raises(InvalidRequest, match="refuses these messages: list object has no element 0"):
        ChatTemplate(LLAMA_3).render([])


def test_text_parts_become_one_text_and_others_are_refused():
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    with pytest.raises(UnsupportedContent, match=r"messages\[0\] has a content part of type 'image_url'"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(UnsupportedContent):
        template.render([{"role": "user", "content": ["text"]}])
    with pytest.raises(InvalidRequest, match="without text"):
        template.render([{"role": "user", "content": [{"type": "text"}]}])


def test_the_callers_messages_are_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, dict(ASSISTANT, reasoning="r")]
    before = json.dumps(messages)
    ChatTemplate(CHATML).render(messages, continue_final_message=True)
    assert json.dumps(messages) == before


def test_continuing_needs_a_last_message_that_the_template_shows():
    with pytest.raises(InvalidRequest, match="needs a last message"):
        ChatTemplate(CHATML).render([], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="leaves the last message out"):
        ChatTemplate("{{ messages[0].content }}").render([USER, ASSISTANT], continue_final_message=True)


def test_the_date_is_todays():
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == time.strftime("%Y")


# --- where the template comes from ------------------------------------------------------------------------------------


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_no_template_is_none(tmp_path: Path):
    assert ChatTemplate.from_folder(tmp_path) is None
    write_config(tmp_path, bos_token="<s>")
    assert ChatTemplate.from_folder(tmp_path) is None


def test_the_sources_go_before_one_another(tmp_path: Path):
    def rendered(override: str | None = None) -> str:
        template = ChatTemplate.from_folder(tmp_path, override)
        assert template is not None
        return template.render([])

    (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}', encoding="utf-8")
    assert rendered() == "old"
    write_config(tmp_path, chat_template="config {{ bos_token }}", bos_token={"content": "<s>"})
    assert rendered() == "config <s>"
    write_config(
        tmp_path, chat_template=[{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    )
    assert rendered() == "default"
    (tmp_path / "chat_template.jinja").write_text("jinja", encoding="utf-8")
    assert rendered() == "jinja"
    assert rendered("override") == "override"


@pytest.mark.parametrize("place", ["config", "files"])
@pytest.mark.parametrize("names", [("default",), ("default", "rag"), ("default", "tool_use"), ("rag", "tool_use")])
def test_named_templates_are_chosen_as_transformers_chooses(tmp_path: Path, place: str, names: tuple[str, ...]):
    transformers = pytest.importorskip("transformers")
    byte_level()._inner.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    if place == "config":
        named = [{"name": name, "template": f"{name} {{{{ tools|length }}}}"} for name in names]
        write_config(tmp_path, tokenizer_class="PreTrainedTokenizerFast", chat_template=named)
    for name in names if place == "files" else ():
        more = tmp_path / "additional_chat_templates" / f"{name}.jinja"
        path = tmp_path / "chat_template.jinja" if name == "default" else more
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{name} {{{{ tools|length }}}}", encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for tools in ([tool], []) if "default" in names else ([tool],):
        expected = theirs.apply_chat_template([USER], tools=tools, tokenize=False)
        assert template.render([USER], tools=tools) == expected
    if "default" not in names:
        with pytest.raises(ValueError, match="no default"):
            theirs.apply_chat_template([USER], tokenize=False)
        with pytest.raises(InvalidRequest, match="templates are rag, tool_use, and none is `default`"):
            template.render([USER])


@pytest.mark.parametrize("named", [5, [{"name": "default"}], ["default"], [{"name": "default", "template": 5}]])
def test_a_broken_entry_of_templates_names_file_and_field(tmp_path: Path, named: object):
    write_config(tmp_path, chat_template=named)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template: .*(Expected|missing)") as caught:
        ChatTemplate.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_pipe_or_a_template_with_a_mistake_is_told(tmp_path: Path):
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is no file"):
        ChatTemplate.from_folder(tmp_path)

    with pytest.raises(CheckpointError, match="error in line 2"):
        ChatTemplate("fine\n{% for %}")


# --- hostile templates ------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages.__setitem__(0, 1) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ dict.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{% set n = namespace(__class__=1) %}{{ n }}",
    "{% set n = namespace() %}{% set n['__x__'] = 1 %}{{ n }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_there_is_no_way_out_of_the_sandbox(source: str):
    try:
        shown = ChatTemplate(source).render([{"role": "user", "content": "x"}])
    except (CheckpointError, InvalidRequest):
        return
    assert shown == ""  # an undefined value: nothing was reached


BOMBS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 10**10000 ** 2 }}",
    "{% set ns = namespace(s='a' * 99) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='a' * 99) %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s|replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}",
    "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    "{{ 'a'|center(10**8) }}",
    "{{ 'a'.ljust(10**8) }}",
    "{{ '%100000000d' % 1 }}",
    "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "{{ lipsum(n=10**6) }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_bomb_is_stopped_in_time(source: str):
    began = time.thread_time()  # what other processes take does not count
    with pytest.raises((CheckpointError, InvalidRequest)):
        ChatTemplate(source, time_limit_s=0.5, max_chars=2**22).render([{"role": "user", "content": "x"}])
    assert time.thread_time() - began < 5


def test_the_time_limit_is_read_from_the_clock_given():
    seconds = iter(range(1000))
    template = ChatTemplate("{% for i in range(1000) %}x{% endfor %}", time_limit_s=50, clock=lambda: next(seconds))
    with pytest.raises(CheckpointError, match="ran longer than 50 s"):
        template.render([])


def test_renders_in_many_threads_have_their_own_budgets():
    template = ChatTemplate(CHATML, NAMED, time_limit_s=60)
    expected = template.render([USER, ASSISTANT] * 50)
    wrong: list[Any] = []

    def work() -> None:
        try:
            wrong.extend(text for _ in range(20) if (text := template.render([USER, ASSISTANT] * 50)) != expected)
        except Exception as error:  # a thread's error must reach the test
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert not wrong


def test_a_long_chat_renders_and_its_time_goes_by_the_work():
    messages = [USER, {**ASSISTANT, "content": "word " * 200}] * 2500
    looks = iter(range(10**6))
    template = ChatTemplate(CHATML, NAMED, time_limit_s=10**6, clock=lambda: next(looks))
    assert len(template.render(messages)) > 2_500_000
    assert next(looks) < 5000, "it looks at the clock less than once a message"
