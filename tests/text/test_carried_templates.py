"""The chat templates that llama.cpp carries in its sources: what each writes of calls is read off and parsed back.

They are not ours to carry; `make soak` fetches them, and MAITRED_CHAT_TEMPLATES names a folder of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maitred.core.errors import MaitredError
from maitred.text.answer_format import AnswerFormat
from maitred.text.chat_template import ChatTemplate
from maitred.text.tool_format import read_answer_format
from tests.text.answers import CALLS, answer_of, parse, tool_calls

pytestmark = pytest.mark.soak

FOLDER = os.environ.get("MAITRED_CHAT_TEMPLATES", "")
TEMPLATES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
NAMES = {
    "ByteDance-Seed-OSS": "template",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm47",
    "HuggingFaceTB-SmolLM3-3B": "hermes",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_call_id",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "google-gemma-2-2b-it": "hermes",
    "google-gemma-4-31B-it": "gemma4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.0": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral_args",
    "openai-gpt-oss-120b": "harmony",
}
UNREADABLE = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "refuses schemas without additionalProperties",
    "Kimi-K2-Instruct": "changes a list, which the sandbox (transformers' too) does not let it",
    "Kimi-K2-Thinking": "changes a list, which the sandbox (transformers' too) does not let it",
    "Kimi-K3": "closes with a name what it opened with another tag, in a form of its own",
    "LFM2-8B-A1B": "writes no calls",
    "LFM2.5-Instruct": "writes no calls",
    "LFM2.5-8B-A1B": "writes calls in Python",
    "MiniMax-M3": "writes each key as a tag",
    "fireworks-ai-llama-3-firefunction-v2": "takes tools only as text, by a name of its own",
    "meetkai-functionary-medium-v3.2": "begins a call with nothing but its name",
}
SIMPLE_ONLY = {"openbmb-MiniCPM5-1B": "writes some texts as CDATA"}


@pytest.mark.skipif(len(TEMPLATES) < 70, reason="MAITRED_CHAT_TEMPLATES names no folder with the 70 templates")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_calls_that_a_carried_template_writes_are_parsed_back(path: Path):
    template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    found = read_answer_format(template)
    assert found.name == NAMES.get(path.stem, found.name)
    if path.stem in UNREADABLE:
        pytest.skip(UNREADABLE[path.stem])
    assert found.calls is not None
    if found.writes_calls:
        for names in calls_to_try(path.stem, found):
            parsed_back(template, found, names)


def calls_to_try(stem: str, found: AnswerFormat) -> list[list[str]]:
    names = ["get_weather", "list_all"] if stem in SIMPLE_ONLY else list(CALLS)
    several = [["list_all", "get_weather"]] if found.calls is not None and found.calls.several else []
    return [[name] for name in names] + several


def parsed_back(template: ChatTemplate, found: AnswerFormat, names: list[str]) -> None:
    try:
        answer = answer_of(template, {"content": None, "tool_calls": tool_calls(names)})
    except MaitredError as error:
        pytest.fail(f"the template refuses {names}: {error}")
    whole = parse(found, [answer])
    assert whole.arguments == [(name, CALLS[name]) for name in names]
    assert parse(found, list(answer)) == whole
