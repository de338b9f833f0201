"""From progress to text: stop strings, hidden stop tokens, min_tokens, whole outputs."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.request import FinishReason, SamplingParams
from maitred.engine.intake import ServedModel, make_requests
from maitred.engine.output import OutputBuilder, RequestOutput
from tests.engine.worlds import scripted_core, served_model

MODEL = served_model()


def run(answer: str | Sequence[int], sampling: SamplingParams, model: ServedModel = MODEL) -> RequestOutput:
    """What an offline run gives when the model says `answer`."""
    requests = make_requests(model, "Hello there", sampling, request_id="r", now=0.0)
    core = scripted_core(model, answer, requests[0].num_prompt_tokens)
    builder = OutputBuilder(model.tokenizer, requests, "Hello there")
    for request in requests:
        core.add(request)
    while core.has_work:
        for progress in core.step():
            if builder.push(progress):
                ended = core.finish(progress.request_id, FinishReason.STOP)
                assert ended is not None
                builder.complete(ended)
    assert core.stats.num_blocks_used == 0
    return builder.output


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **fields})  # type: ignore[arg-type]


def test_text_ends_before_the_end_of_sequence_token():
    output = run("One soup, please.", greedy()).outputs[0]
    assert output.text == "One soup, please."
    assert output.finish_reason == "stop"
    assert output.stop_reason is None
    assert output.token_ids[-1] in MODEL.eos_token_ids


def test_max_tokens_ends_with_length():
    output = run("One soup, please.", greedy(max_tokens=2)).outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 2)


def test_a_stop_string_across_tokens_cuts_the_text_and_names_itself():
    output = run("One soup and two teas.", greedy(stop=["p and t"])).outputs[0]
    assert output.text == "One sou"
    assert (output.finish_reason, output.stop_reason) == ("stop", "p and t")
    assert output.timing is not None


def test_a_stop_string_can_be_kept():
    output = run("One soup and two teas.", greedy(stop=["and"], include_stop_str_in_output=True)).outputs[0]
    assert output.text == "One soup and"


def test_a_stop_string_that_never_completes_is_given_out_at_the_end():
    assert run("One soup.", greedy(stop=["soup.!"])).outputs[0].text == "One soup."


def test_a_stop_token_is_named_and_hidden_unless_asked_for():
    token = MODEL.tokenizer.encode("x", add_special_tokens=False)[0]
    tokens = [*MODEL.tokenizer.encode("One soup", add_special_tokens=False), token]
    hidden = run(tokens, greedy(stop_token_ids=[token])).outputs[0]
    assert (hidden.text, hidden.stop_reason) == ("One soup", token)
    shown = run(tokens, greedy(stop_token_ids=[token], include_stop_str_in_output=True)).outputs[0]
    assert shown.text == "One soupx"


def test_min_tokens_lets_an_early_stop_string_pass():
    output = run("a a a a", greedy(stop=["a"], min_tokens=2)).outputs[0]
    assert len(output.token_ids) > 2
    assert output.text.startswith("a")
    assert output.stop_reason == "a"


def test_logprobs_come_one_for_each_token_and_add_up():
    output = run("One soup", greedy(logprobs=0)).outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    assert output.cumulative_logprob == -0.5 * len(output.token_ids)


def test_prompt_logprobs_begin_with_none_for_the_first_token():
    output = run("One soup", greedy(prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_every_sample_is_gathered():
    output = run("One soup", greedy(n=3))
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert {sample.text for sample in output.outputs} == {"One soup"}


@given(text=st.text(max_size=40), stop=st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_text_is_what_comes_before_the_first_stop_string(text: str, stop: list[str]):
    text = MODEL.tokenizer.decode(MODEL.tokenizer.encode(text, add_special_tokens=False))
    ends = [text.find(string) for string in stop if string in text]
    output = run(text, greedy(stop=stop, max_tokens=None)).outputs[0]
    expected = _before_first_stop(text, stop) if ends else text
    assert output.text == expected


def _before_first_stop(text: str, stop: list[str]) -> str:
    """The stop string that is complete first ends the text; of two that end together, the one that began first."""
    for end in range(len(text) + 1):
        starts = [end - len(string) for string in stop if text[:end].endswith(string)]
        if starts:
            return text[: min(starts)]
    return text
