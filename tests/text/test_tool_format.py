"""Answer formats are read off chat templates: what is around names, arguments and thoughts."""

from __future__ import annotations

import json

import pytest

from maitred.core.errors import ConfigError, InvalidRequest
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text.answer_format import CallFormat, Mark, Slot, call_id, plain
from maitred.text.chat_template import TOOL_FORMATS, ChatTemplate, with_tools
from maitred.text.folder import read_chat_template
from maitred.text.parts import FolderText
from maitred.text.tool_format import read_answer_format, tool_format_names
from tests.text.answers import TOOLS, TURNS, template_of, tokenizer_with, tool_calls


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_template_that_writes_a_known_format_is_read_as_that(name: str):
    found = read_answer_format(template_of(name))
    assert found.name == name
    assert found.calls is not None
    assert found.calls.several == (name != "llama3")
    assert found.reasoning is not None
    assert found.reasoning_name == "think"
    assert found.writes_calls
    assert found.tools_system_text is None


def calls_of(writes: str) -> CallFormat:
    found = read_answer_format(ChatTemplate(TURNS.replace("CALLS", writes))).calls
    assert found is not None
    return found


def test_json_objects_alone_in_a_list_or_behind_a_name():
    calls = calls_of(
        "<calls>[{% for t in m.tool_calls %}"
        '{"tool": {{ t.function.name | tojson }}, "args": {{ t.function.arguments | tojson }}, "n": {{ loop.index }}}'
        "{{ ', ' if not loop.last }}{% endfor %}]</calls>"
    )
    assert (calls.kind, calls.name_key, calls.arguments_key) == ("json", "tool", "args")
    assert (calls.begin, calls.separator, calls.end) == (("<calls>[",), (", ",), ("]</calls>",))
    assert calls.call == ('{"tool": "', Slot.NAME, '", "args": ', Slot.ARGUMENTS, ', "n": ', Slot.INDEX, "}")
    assert calls.index_from == 1

    calls = calls_of(
        "{% for t in m.tool_calls %}<call id={{ t.id }}>{{ t.function.name }}: {{ t.function.arguments | tojson }}"
        "</call>{% endfor %}"
    )
    assert calls.kind == "name_json"
    assert calls.call_begin == ("<call id=",)
    assert calls.call == (Slot.ID, ">", Slot.NAME, ": ", Slot.ARGUMENTS)
    assert calls.call_end == ("</call>",)

    calls = calls_of("{% for t in m.tool_calls %}{{ '\n' }}<c>{{ t.function | tojson }}</c>{% endfor %}")
    assert calls.begin == ()
    assert calls.call_begin == ("<c>",)
    assert calls.separator == ("\n",)

    calls = calls_of("{% if m.tool_calls | length > 1 %}{{ raise_exception('one!') }}{% endif %}<c>"
                     "{{ m.tool_calls[0].function | tojson }}</c>")  # fmt: skip
    assert not calls.several
    assert calls.call_begin == ("<c>",)
    assert calls.call_end == ("</c>",)

    checks = "{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    assert calls_of(checks + "{% for t in m.tool_calls %}<c>{{ t.function | tojson }}</c>{% endfor %}").id_length == 9
    assert len(call_id("r", 0, 9)) == 9
    assert call_id("r", 0) == call_id("r", 0) != call_id("r", 1)


def test_pairs_whose_literals_tell_the_type():
    calls = calls_of(
        '{% for t in m.tool_calls %}\n<do n="{{ t.function.name }}">{% for k, v in t.function.arguments.items() %}'
        '<p k="{{ k }}" text="{{ 1 if v is string else 0 }}">{{ v if v is string else v | tojson }}</p>{% endfor %}'
        "</do>{% endfor %}"
    )
    assert calls.kind == "pairs"
    assert calls.pairs is not None
    assert (calls.call_begin, calls.call, calls.call_end) == (('<do n="',), (Slot.NAME, '">', Slot.PAIRS), ("</do>",))
    assert (calls.pairs.key_begin, calls.pairs.value_end) == (('<p k="',), ("</p>",))
    assert calls.pairs.value_begin == ('" text="1">',)
    assert calls.pairs.value_begin_of["object"] == ('" text="0">',)


def test_what_is_a_token_is_a_mark_even_one_that_the_template_does_not_write():
    tokenizer = tokenizer_with("<tool_call>", "</tool_call>", "<think>", "</think>", "\n\n", "name")
    found = read_answer_format(template_of("hermes"), tokenizer)
    assert found.calls is not None
    assert found.reasoning is not None
    assert found.name == "hermes"
    mark = {text: Mark(text, tokenizer.token_id(text) or 0) for text in tokenizer.added_tokens}
    assert found.calls.call_begin == (mark["<tool_call>"], "\n")
    assert found.calls.call_end[1] == mark["</tool_call>"]
    assert found.reasoning.begin == (mark["<think>"],)
    assert found.mark_ids == {mark[text].token_id for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")}

    tokenizer = tokenizer_with("<|python_tag|>")
    calls = read_answer_format(template_of("llama3"), tokenizer).calls
    assert calls is not None
    assert [type(piece) for piece in calls.opener] == [Mark]


# Thoughts.


def test_thoughts_are_found_at_their_marks_or_where_only_the_prompt_begins_them():
    reasoning = read_answer_format(template_of("hermes")).reasoning
    assert reasoning is not None
    assert (reasoning.begin, reasoning.end) == (("<think>",), ("</think>",))
    assert (reasoning.before, reasoning.after, reasoning.behind) == ("\n", "\n", "\n\n")
    assert reasoning.opened_by("<|im_start|>assistant\n<think>\n")
    assert not reasoning.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")

    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    found = read_answer_format(ChatTemplate(turns + "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"))
    assert found.reasoning is not None
    assert (found.reasoning.begin, found.reasoning.before, found.reasoning.end) == (("<think>",), "\n", ("</think>",))

    turns = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.thinking %}{{ m.thinking }}\n[ANSWER]\n{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>I think:\n{% endif %}"
    )
    reasoning = read_answer_format(ChatTemplate(turns)).reasoning
    assert reasoning is not None
    assert (plain(reasoning.begin), plain(reasoning.end), reasoning.behind) == ("I think:", "[ANSWER]", "\n")

    found = read_answer_format(ChatTemplate("{# <|channel|>analysis<|message|> and <|channel|>commentary #}"))
    assert found.channels
    assert found.name == found.reasoning_name == "harmony"
    assert found.calls is not None


# Templates that do not show it.


def test_templates_that_know_no_tools_get_our_own_words():
    found = read_answer_format(ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"))
    assert found.name == "hermes"
    assert found.tools_system_text is not None
    assert not found.writes_calls
    text = found.tools_system_text([{"type": "function", "function": {"name": "look", "parameters": {}}}])
    assert '"look"' in text
    assert "<tool_call>" in text

    found = read_answer_format(ChatTemplate("{{ raise_exception('never') }}"))
    assert found.reasoning is None
    assert found.tools_system_text is not None


@pytest.mark.parametrize(
    ("sign", "name"), [("xml_tools", "hermes"), ("<|tool_call|>", "granite"), ("<|tool|>x<|/tool|>", "phi4_mini")]
)
def test_templates_that_tell_of_tools_but_write_no_call_are_known_by_a_sign(sign: str, name: str):
    source = "{# SIGN #}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}".replace("SIGN", sign)
    found = read_answer_format(ChatTemplate(source))
    assert found.name == name
    assert found.calls is not None
    assert not found.writes_calls
    assert found.tools_system_text is None


@pytest.mark.parametrize(
    "writes",
    [
        "{% for t in m.tool_calls %}[{{ t.function.name }}({% for k, v in t.function.arguments.items() %}{{ k }}="
        "{{ v }}{{ ', ' if not loop.last }}{% endfor %})]{% endfor %}",
        "{{ m.tool_calls[0].function.name }}",
        "{{ raise_exception('no tools here') }}",
    ],
)
def test_calls_that_are_none_of_the_forms_are_not_read(writes: str):
    found = read_answer_format(ChatTemplate(TURNS.replace("CALLS", writes)))
    assert found.calls is None
    assert found.name == "none"
    assert found.reasoning is not None


def test_the_built_in_models_template_has_a_format():
    text = FolderText(BUILTIN_FOLDER, read_chat_template(BUILTIN_FOLDER))
    assert text.chat_template is not None
    assert read_answer_format(text.chat_template, text.tokenizer).calls is not None


def test_a_named_format_goes_before_the_templates():
    assert read_answer_format(template_of("hermes"), override="glm45").name == "glm45"
    assert read_answer_format(template_of("hermes"), override="harmony").channels
    with pytest.raises(ConfigError, match=r"'hermse' \(did you mean hermes\?\); choose one of deepseek_v3"):
        read_answer_format(template_of("hermes"), override="hermse")
    assert {"hermes", "harmony", "llama3", "mistral"} <= set(tool_format_names())


WRITES_ALL = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
TURNS_ONLY = """\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}\
{% endif %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"""


def call(arguments: object) -> dict:
    return {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": arguments}}]}


def rendered(source: str, *messages: dict) -> list[dict]:
    text = ChatTemplate(source).render(messages, add_generation_prompt=False)
    return [json.loads(line) for line in text.splitlines()]


def test_arguments_reach_a_template_as_objects():
    (message,) = rendered(WRITES_ALL, call('{"a": ["\\u00e9", 1.0]}'))
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": ["é", 1.0]}
    for empty in ("", None, "{}", {}):
        assert rendered(WRITES_ALL, call(empty))[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_a_template_is_given_text_where_it_takes_only_that():
    source = "{% for m in messages %}{% for t in m.tool_calls or [] %}<{{ t.function.name }}>"
    source += "{{ 'x' + t.function.arguments }}{% endfor %}{% endfor %}"
    assert ChatTemplate(source).render([call('{"a": 1}')]) == '<look>x{"a": 1}'

    source = "{% for m in messages %}{{ m.content }}|{% for t in m.tool_calls or [] %}{{ t.function.name }}{% endfor %}"
    assert ChatTemplate(source + "{% endfor %}").render([call("{}")]) == "|look"
    only_none = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% endif %}"
    assert ChatTemplate(only_none + "{% endfor %}").render([call("{}")]) == "look"


def test_a_result_has_the_name_of_the_tool_that_was_called():
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert rendered(WRITES_ALL, call("{}"), result)[1]["name"] == "look"
    assert rendered(WRITES_ALL, call("{}"), {**result, "name": "other"})[1]["name"] == "other"


@pytest.mark.parametrize("text", ['{"a": ', "[1]", '{"a": NaN}', "[" * 100_000, '"{}"'])
def test_arguments_that_are_no_object_are_text_or_an_empty_object(text: str):
    """A call that was cut is sent back as it was told."""
    [message] = rendered(WRITES_ALL, call(text))
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    source = "{% for m in messages %}{% for t in m.tool_calls or [] %}<{{ t.function.name }}>"
    source += "{{ 'x' + t.function.arguments }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source)
    assert not template.takes_objects
    assert template.render([call(text)]) == "<look>x" + text


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (call([1]), "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": {"id": "c1"}}, "messages[1].tool_calls"),
    ],
)
def test_calls_that_are_none_are_refused_with_their_path(message: dict, path: str):
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate(WRITES_ALL).render([{"role": "user", "content": "q"}, message])
    assert refused.value.param == path


def test_marks_in_arguments_are_letters_and_those_of_calls_in_content_are_tokens():
    tokenizer = tokenizer_with("<|im_start|>", "<|im_end|>", "<tool_call>")
    template = ChatTemplate(template_of("hermes").source, added_tokens=tokenizer.added_tokens)
    ids = tokenizer.encode(template.render([call({"<|im_end|>": "a<|im_end|>"})], add_generation_prompt=False))
    assert ids.count(tokenizer.token_id("<|im_end|>")) == 1
    assert ids.count(tokenizer.token_id("<tool_call>")) == 1

    tokenizer = tokenizer_with("<|tool_call|>", "<|end|>")
    marks = dict.fromkeys(tokenizer.added_tokens, True)
    template = ChatTemplate("{# <|tool_call|> #}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}",
                            added_tokens=marks)  # fmt: skip
    message = {**call({"a": "<|tool_call|><|end|>"}), "content": "<|end|>"}
    chat, _ = with_tools(read_answer_format(template, tokenizer), [message], None)
    ids = tokenizer.encode(template.render(chat))
    assert ids.count(tokenizer.token_id("<|tool_call|>")) == 1
    assert ids.count(tokenizer.token_id("<|end|>")) == 1


# Templates that write no calls.

CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": tool_calls(["get_weather", "list_all"])},
    {"role": "tool", "tool_call_id": "callid000", "content": "sunny"},
    {"role": "tool", "tool_call_id": "callid001", "content": "[]"},
    {"role": "assistant", "content": "It is sunny."},
]


def test_a_template_without_tools_tells_of_them_and_of_calls_in_its_turns():
    template = ChatTemplate(TURNS_ONLY)
    chat, variables = with_tools(read_answer_format(template), CONVERSATION, TOOLS)
    prompt = template.render(chat, **variables)
    assert prompt.startswith("[user]You can call these functions")
    assert '"name": "get_weather_now"' in prompt
    assert (
        "Weather?[assistant]"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
        '\n<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>'
        "[user]<tool_response>\nsunny\n</tool_response>\n<tool_response>\n[]\n</tool_response>"
        "[assistant]It is sunny."
    ) in prompt


def test_a_template_that_writes_calls_is_given_messages_and_tools_as_they_are():
    template = template_of("hermes")
    chat, variables = with_tools(read_answer_format(template), CONVERSATION, TOOLS)
    assert variables == {"tools": TOOLS}
    assert [message["role"] for message in chat][2] == "tool"
    assert with_tools(read_answer_format(template), CONVERSATION, None)[1] == {}


def test_tools_are_told_by_the_name_and_in_the_place_that_a_template_takes_them():
    echo = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tools }}{% endfor %}"
    smollm = ChatTemplate("{# xml_tools #}" + echo)
    assert with_tools(read_answer_format(smollm), CONVERSATION, TOOLS)[1] == {"xml_tools": TOOLS}
    phi = ChatTemplate("{# <|/tool|> #}" + echo)
    chat, variables = with_tools(read_answer_format(phi), CONVERSATION, TOOLS)
    assert variables == {}
    assert json.loads(chat[0]["tools"])[0]["name"] == "get_weather"
    assert chat[0]["role"] == "system"
    assert chat[3]["role"] == "tool_response"
