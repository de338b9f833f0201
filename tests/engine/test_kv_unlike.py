"""KV pulled from an engine that is not like this one: converted or refused; never a wrong token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engine.test_kv_peers import PROMPT, Engine

Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Engine] = []

    def one(**fields: object) -> Engine:
        made.append(
            Engine(**{"transport": "tcp", "max_model_len": 400, "dtype": "float32", "kv_dtype": "float32"} | fields)
        )
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.mark.parametrize(("gives", "takes", "num_cached"), [(16, 64, 192), (64, 16, 192), (32, 48, 192), (10, 16, 160)])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "n": 4}])
def test_blocks_of_another_size_are_converted(make: Make, gives, takes, num_cached, sampling):
    first, second = make(block_size=gives), make(block_size=takes)
    said = first.complete("a", **sampling)
    first.rest_in_thread()
    assert second.complete("b", PROMPT, first.peers.gives.addresses, **sampling) == said
    assert (second.cached[0], second.handovers[0]) == (num_cached, "moved")


def test_a_turn_is_found_under_the_names_that_the_source_gave_it(make: Make):
    first, second = make(block_size=32), make(block_size=16)
    said = first.complete("a")
    first.rest_in_thread()
    turn = [*PROMPT, *said[0], 5]
    assert second.complete("b", turn, first.peers.gives.addresses) == make().complete("c", turn)
    assert second.cached == [192]
    second.complete("d", turn, first.peers.gives.addresses)
    assert second.handovers == ["local"]


def test_a_prompt_counts_as_moved_when_an_expecting_pull_brought_all_whole_blocks_of_the_source(make: Make):
    first, second = make(block_size=64), make(block_size=16)
    prompt = [*PROMPT, *range(500, 545)]
    said = first.complete("a", prompt)
    first.rest_in_thread()
    addresses = first.peers.gives.addresses
    second.expect("expected", addresses, prompt)
    second.hear(lambda: not second.core.has_work)
    for outcome, num_cached in (("moved", 192), ("local", 240)):
        assert second.complete(outcome, prompt, addresses) == said
        assert (second.cached, second.handovers) == ([num_cached], [outcome])


@pytest.mark.parametrize(("gives", "takes"), [("mtp", "off"), ("off", "mtp")])
def test_a_draft_head_at_one_end_is_left_out(make: Make, gives, takes):
    first, second = make(speculative=gives), make(speculative=takes)
    said = first.complete("a")
    first.rest_in_thread()
    assert second.complete("b", PROMPT, first.peers.gives.addresses) == said
    assert (second.cached, second.handovers) == ([192], ["moved"])


@pytest.mark.parametrize(
    ("takes", "sides"),
    [
        ({"kv_dtype": "bfloat16"}, "kv_dtype is 'float32' here, 'bfloat16' there"),
        ({"max_model_len": 256}, "context 400' here, "),
        ({"dtype": "int8"}, "weight_dtype is 'float32' here, 'int8' there"),
        ({"revision": "abc"}, "' here, 'abc' there"),
        ({"executor": "torch", "device": "cpu"}, "executor is 'native' here, 'torch' there"),
    ],
)
def test_first_contact_refuses_what_is_unlike_and_names_both_sides(make: Make, caplog, takes, sides):
    first, second = make(), make(**takes)
    first.complete("a")
    first.rest_in_thread()
    for name, prompt in {"b": PROMPT, "c": PROMPT[::-1]}.items():
        assert second.complete(name, prompt, first.peers.gives.addresses) == make(**takes).complete(name, prompt)
        assert second.handovers == ["recomputed"]
    (told,) = [each.getMessage() for each in caplog.records if each.name == "maitred.engine.kv_peers"]
    assert sides in told
    assert second.peers.counts.dropped["unlike"] == 24
