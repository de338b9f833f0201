from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from maitred.executor.state import DraftAsk, HeldRequest
from maitred.executor.text_drafts import LONGEST_MATCH, NGramProposer, PairIndex, PredictionProposer
from tests.fakes import make_new


def held(prompt: Sequence[int], output: Sequence[int] = (), prediction: Sequence[int] = ()) -> HeldRequest:
    return HeldRequest(make_new("a", prompt, output, prediction_token_ids=tuple(prediction)), vocab_size=1000)


def drafts(prompt: Sequence[int], count: int = 5) -> list[int]:
    return list(NGramProposer().propose([DraftAsk(held(prompt), count)])[0])


def test_what_followed_before_is_drafted():
    assert drafts([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], count=3) == [4, 5, 6]


def test_no_more_is_drafted_than_matched():
    assert drafts([1, 2, 3, 4, 5, 6, 9, 2, 3]) == [4, 5]


def test_the_longest_match_goes_before_a_later_one():
    assert drafts([1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3]) == [40, 9, 2]


def test_of_matches_as_long_the_last_one_counts():
    assert drafts([2, 3, 40, 9, 2, 3, 50, 8, 2, 3]) == [50, 8]


def test_what_repeats_itself_goes_on_repeating():
    assert drafts([7, 1, 2, 1, 2, 1, 2], count=5) == [1, 2, 1, 2]
    assert drafts([4, 4, 4, 4, 4, 4, 4], count=5) == [4, 4, 4, 4, 4]


@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3, 4], [1, 2, 3, 9, 2]])
def test_nothing_is_drafted_where_no_two_tokens_were_met(prompt: list[int]):
    assert drafts(prompt) == []


def test_tokens_that_come_are_known_in_the_next_step():
    proposer, state = NGramProposer(), held([1, 2, 3, 4])
    assert proposer.propose([DraftAsk(state, 4)]) == [()]
    for token in (1, 2, 3):
        state.append(token)
    assert proposer.propose([DraftAsk(state, 4)]) == [[4, 1, 2]]


def test_a_request_that_is_held_anew_begins_anew():
    proposer = NGramProposer()
    proposer.propose([DraftAsk(held([1, 2, 3, 1, 2]), 4)])
    proposer.forget("a")
    proposer.forget("never heard of")
    assert proposer.propose([DraftAsk(held([5, 6, 7, 5, 6]), 4)]) == [[7, 5]]


def longest_by_search(tokens: Sequence[int]) -> int:
    """Of tokens before the end that are like the end, as far as they are looked at."""
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), 1, -1):
        if any(tokens[i : i + length] == tokens[-length:] for i in range(len(tokens) - length)):
            return length
    return 0


def test_the_index_finds_what_a_search_finds():
    chooser = Random(5)
    for _ in range(300):
        tokens = [chooser.randrange(3) for _ in range(chooser.randint(1, 16))]
        index = PairIndex()
        for first in range(0, len(tokens), 3):
            index.extend(tokens[first : first + 3])
        match = index.match(index.tokens)
        assert (match.length if match else 0) == longest_by_search(tokens)


# ---- predictions


def followed(prediction: Sequence[int], *steps: tuple[Sequence[int], Sequence[int]]) -> None:
    """Each step: output that came, and what is drafted after it."""
    proposer, state = PredictionProposer(NGramProposer()), held([900, 901, 900, 901], prediction=prediction)
    for output, expected in steps:
        for token in output:
            state.append(token)
        assert list(proposer.propose([DraftAsk(state, 3)])[0]) == expected


def test_a_prediction_is_drafted_from_its_beginning():
    followed([1, 2, 3, 4, 5, 6], ([], [1, 2, 3]), ([1, 2, 3, 4], [5, 6]), ([5, 6], []), ([7], []))


def test_a_token_in_the_place_of_another_is_stepped_over():
    followed([1, 2, 3, 4, 5, 6], ([1, 20], [3, 4, 5]), ([3, 4, 5, 6], []))


def test_a_prediction_is_found_again_behind_what_was_put_in_or_left_out():
    prediction = list(range(1, 20))
    followed(prediction, ([1, 2, 50, 51, 52], [6, 7, 8]), ([3, 4], [5, 6]), ([5, 6, 7], [8, 9, 10]))
    followed(prediction, ([1, 2, 3], [4, 5, 6]), ([12, 13], [14, 15]))


def test_a_request_that_left_its_prediction_is_drafted_for_from_its_own_text():
    followed([1, 2, 3, 4, 5, 6], ([50], [2, 3, 4]), ([51], [3]), ([52], []), ([900, 901], [50, 51]), ([3, 4], [5, 6]))


def test_requests_without_a_prediction_are_drafted_for_as_ever():
    proposer = PredictionProposer(NGramProposer())
    asks = [
        DraftAsk(held([1, 2, 3, 1, 2]), 3),
        DraftAsk(held([1, 2, 3, 1, 2], prediction=[8, 9]), 3),
        DraftAsk(held([1, 2, 4]), 3),
    ]
    assert list(map(list, proposer.propose(asks[1:]))) == [[8, 9], []]
    proposer.forget("a")
    assert list(map(list, proposer.propose(asks[:1]))) == [[3, 1]]
    assert proposer.name == "ngram"


def test_one_that_was_preempted_finds_its_place_again():
    proposer = PredictionProposer(NGramProposer())
    state = held([7], output=[1, 2, 3, 4], prediction=[1, 2, 3, 4, 5, 6])
    assert list(proposer.propose([DraftAsk(state, 3)])[0]) == [5, 6]
