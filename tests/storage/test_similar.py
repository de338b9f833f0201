"""Which answer a similar prompt gets: the nearest within the bound that is kept, some computed too, none once wrong."""

from __future__ import annotations

import numpy as np

from maitred.storage.similar import MAX_TEXTS, SimilarAnswers


def at(degrees: float) -> np.ndarray:
    return np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], np.float32)


def test_the_nearest_within_the_bound_is_found_if_its_answer_is_kept():
    answers = SimilarAnswers(bound=0.97, check=0.0)  # 14 degrees
    for degrees, key in ((0, b"far"), (20, b"near"), (22, b"nearest")):
        answers.keep(b"rest", at(degrees), key, key.decode())
    found = answers.find(b"rest", at(23), lambda key: True)
    assert found is not None
    assert (found.key, found.answer) == (b"nearest", "nearest")
    assert abs(found.similarity - np.cos(np.radians(1))) < 1e-6
    gone = answers.find(b"rest", at(23), lambda key: key != b"nearest")
    assert gone is not None
    assert gone.key == b"near"
    assert answers.find(b"rest", at(23), lambda key: key == b"far") is None
    assert answers.find(b"other", at(23), lambda key: True) is None


def test_a_request_computed_again_stands_once_and_the_oldest_go_first():
    answers = SimilarAnswers(bound=0.9999, check=0.0)
    for _ in range(2):
        answers.keep(b"rest", at(0), b"same", "text")
    for number in range(MAX_TEXTS - 1):
        answers.keep(b"rest", at(90), b"%d" % number, "")
    assert answers.find(b"rest", at(0), lambda key: True) is not None
    answers.keep(b"rest", at(90), b"one more", "")
    assert answers.find(b"rest", at(0), lambda key: True) is None


def test_a_share_of_the_hits_is_computed_too():
    answers = SimilarAnswers(bound=0.97, check=0.05)
    checked = [answers.is_checked() for _ in range(100)]
    assert (sum(checked), checked[0], answers.num_hits) == (5, True, 100)
    assert not any(SimilarAnswers(bound=0.97, check=0.0).is_checked() for _ in range(100))


def test_over_one_percent_of_unlike_answers_turns_it_off():
    answers = SimilarAnswers(bound=0.97, check=1.0)
    answers.keep(b"rest", at(0), b"key", "")
    assert not answers.checked(0.5), "one of few is no share"
    assert not any(answers.checked(0.99) for _ in range(98))
    assert answers.find(b"rest", at(0), lambda key: True) is not None
    assert answers.checked(float("nan")), "the second of 100"
    assert answers.find(b"rest", at(0), lambda key: True) is None
    assert not answers.checked(0.1), "told once"
