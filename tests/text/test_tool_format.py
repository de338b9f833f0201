"""Answer formats are read off chat templates: what is around names, arguments and thoughts."""

from __future__ import annotations

import pytest

from maitred.core.errors import ConfigError
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text.answer_format import CallFormat, Mark, Slot, call_id, plain
from maitred.text.chat_template import TOOL_FORMATS, ChatTemplate
from maitred.text.folder import read_chat_template
from maitred.text.parts import FolderText
from maitred.text.tool_format import read_answer_format, tool_format_names
from tests.text.answers import TURNS, template_of, tokenizer_with


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


def test_json_objects_in_a_list():
    calls = calls_of(
        "<calls>[{% for t in m.tool_calls %}"
        '{"tool": {{ t.function.name | tojson }}, "args": {{ t.function.arguments | tojson }}, "n": {{ loop.index }}}'
        "{{ ', ' if not loop.last }}{% endfor %}]</calls>"
    )
    assert (calls.kind, calls.name_key, calls.arguments_key) == ("json", "tool", "args")
    assert (calls.begin, calls.separator, calls.end) == (("<calls>[",), (", ",), ("]</calls>",))
    assert calls.call == ('{"tool": "', Slot.NAME, '", "args": ', Slot.ARGUMENTS, ', "n": ', Slot.INDEX, "}")
    assert calls.index_from == 1


def test_a_name_an_id_and_json():
    calls = calls_of(
        "{% for t in m.tool_calls %}<call id={{ t.id }}>{{ t.function.name }}: {{ t.function.arguments | tojson }}"
        "</call>{% endfor %}"
    )
    assert calls.kind == "name_json"
    assert calls.call_begin == ("<call id=",)
    assert calls.call == (Slot.ID, ">", Slot.NAME, ": ", Slot.ARGUMENTS)
    assert calls.call_end == ("</call>",)


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


def test_white_space_before_the_first_call_separates_the_others():
    calls = calls_of("{% for t in m.tool_calls %}{{ '\n' }}<c>{{ t.function | tojson }}</c>{% endfor %}")
    assert calls.begin == ()
    assert calls.call_begin == ("<c>",)
    assert calls.separator == ("\n",)


def test_a_template_that_takes_one_call_at_a_time():
    calls = calls_of("{% if m.tool_calls | length > 1 %}{{ raise_exception('one!') }}{% endif %}<c>"
                     "{{ m.tool_calls[0].function | tojson }}</c>")  # fmt: skip
    assert not calls.several
    assert calls.call_begin == ("<c>",)
    assert calls.call_end == ("</c>",)


def test_ids_of_nine_letters_are_told():
    checks = "{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    assert calls_of(checks + "{% for t in m.tool_calls %}<c>{{ t.function | tojson }}</c>{% endfor %}").id_length == 9
    assert len(call_id("r", 0, 9)) == 9
    assert call_id("r", 0) == call_id("r", 0) != call_id("r", 1)


def test_what_is_a_token_is_a_mark():
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


def test_llama_3_may_open_a_call_with_a_token_that_its_template_does_not_write():
    tokenizer = tokenizer_with("<|python_tag|>")
    calls = read_answer_format(template_of("llama3"), tokenizer).calls
    assert calls is not None
    assert [type(piece) for piece in calls.opener] == [Mark]


# Thoughts.


def test_thoughts_and_the_white_space_at_their_marks():
    reasoning = read_answer_format(template_of("hermes")).reasoning
    assert reasoning is not None
    assert (reasoning.begin, reasoning.end) == (("<think>",), ("</think>",))
    assert (reasoning.before, reasoning.after, reasoning.behind) == ("\n", "\n", "\n\n")
    assert reasoning.opened_by("<|im_start|>assistant\n<think>\n")
    assert not reasoning.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_thoughts_that_only_the_prompt_begins():
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    found = read_answer_format(ChatTemplate(turns + "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"))
    assert found.reasoning is not None
    assert (found.reasoning.begin, found.reasoning.before, found.reasoning.end) == (("<think>",), "\n", ("</think>",))


def test_thoughts_begun_by_words_that_only_the_prompt_has():
    turns = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.thinking %}{{ m.thinking }}\n[ANSWER]\n{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>I think:\n{% endif %}"
    )
    reasoning = read_answer_format(ChatTemplate(turns)).reasoning
    assert reasoning is not None
    assert (plain(reasoning.begin), plain(reasoning.end), reasoning.behind) == ("I think:", "[ANSWER]", "\n")


def test_channels():
    found = read_answer_format(ChatTemplate("{# <|channel|>analysis<|message|> and <|channel|>commentary #}"))
    assert found.channels
    assert found.name == found.reasoning_name == "harmony"
    assert found.calls is not None


# Templates that do not show it.


def test_a_template_that_knows_no_tools_gets_our_own_words():
    found = read_answer_format(ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"))
    assert found.name == "hermes"
    assert found.tools_system_text is not None
    assert not found.writes_calls
    text = found.tools_system_text([{"type": "function", "function": {"name": "look", "parameters": {}}}])
    assert '"look"' in text
    assert "<tool_call>" in text


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


def test_a_template_that_always_raises_has_no_format_of_its_own():
    found = read_answer_format(ChatTemplate("{{ raise_exception('never') }}"))
    assert found.reasoning is None
    assert found.tools_system_text is not None


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
