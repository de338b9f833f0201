"""Versions, scans and the index, without files."""

from __future__ import annotations

import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import CheckpointError
from maitred.core.tensor_request import ModelState
from maitred.model.shelf import version_of
from maitred.tensor.config import parse_config
from maitred.tensor.repository import (
    RepositoryChanges,
    RepositoryIndex,
    labels_of,
    settled_changes,
    versions_to_serve,
)


def config_of(text: str):
    return parse_config(text.encode(), "config.pbtxt")


def test_folders_named_by_a_number_are_versions():
    names = ("1", "12", "0", "01", "-1", "1a", "", "\u0661", "999999999999999999", "9" * 19)
    assert [version_of(name) for name in names] == [1, 12, None, None, None, None, None, None, 10**18 - 1, None]


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", (7,)),
        ("latest { num_versions: 2 }", (3, 7)),
        ("latest { num_versions: 9 }", (1, 3, 7)),
        ("all { }", (1, 3, 7)),
        ("specific { versions: [ 3, 1, 3 ] }", (1, 3)),
        ("specific { versions: 4 }", (4,)),
    ],
)
def test_the_policy_chooses_versions(policy: str, served: tuple[int, ...]):
    assert versions_to_serve(config_of(f"version_policy {{ {policy} }}"), [7, 1, 3]) == served


def test_a_model_without_versions_is_refused():
    with pytest.raises(CheckpointError, match="it has no version"):
        versions_to_serve(config_of(""), [])


def test_labels_name_versions_that_are_served():
    config = config_of('parameters { key: "label.stable" value { string_value: "2" } }')
    assert labels_of(config, (2, 3)) == {"stable": 2}
    with pytest.raises(CheckpointError, match=r"'label.stable' names version 2, and served are: 3, 4"):
        labels_of(config, (3, 4))


# ---- scans

OLD, HALF, NEW = ((("a", 1, 10, 0),), (("a", 2, 5, 0),), (("a", 2, 10, 0),))


def test_a_folder_is_taken_once_it_stood_still_for_a_whole_poll():
    taken = {"m": OLD}
    assert settled_changes(taken, {"m": OLD}, {"m": HALF}) == RepositoryChanges((), ())
    assert settled_changes(taken, {"m": HALF}, {"m": NEW}) == RepositoryChanges((), ())
    assert settled_changes(taken, {"m": NEW}, {"m": NEW}) == RepositoryChanges(("m",), ())
    assert settled_changes({"m": NEW}, {"m": NEW}, {"m": NEW}) == RepositoryChanges((), ())


def test_a_folder_that_is_replaced_is_not_unloaded_between():
    taken = {"m": OLD}
    assert settled_changes(taken, {"m": OLD}, {}) == RepositoryChanges((), ())
    assert settled_changes(taken, {}, {"m": NEW}) == RepositoryChanges((), ())
    assert settled_changes(taken, {}, {}) == RepositoryChanges((), ("m",))


SCANS = st.dictionaries(st.sampled_from("abc"), st.sampled_from([OLD, HALF, NEW]))


@given(st.lists(SCANS, min_size=1, max_size=8))
def test_whatever_happens_what_stands_still_is_what_is_served(scans):
    taken, last = {}, {}
    for now in [*scans, scans[-1]]:
        changes = settled_changes(taken, last, now)
        assert not {*changes.load} & {*changes.unload}
        assert all(last[name] == now[name] != taken.get(name) for name in changes.load)
        taken = {name: print_ for name, print_ in taken.items() if name not in changes.unload}
        taken |= {name: now[name] for name in changes.load}
        last = now
    assert taken == scans[-1]


# ---- the index


def told(index: RepositoryIndex) -> list[tuple]:
    return [(each.name, each.version, each.state and each.state.value, each.reason) for each in index.entries()]


def test_a_version_goes_through_its_states():
    index = RepositoryIndex()
    index.found(["m"])
    assert told(index) == [("m", None, None, "")]
    index.loading("m", 1)
    assert index.ready("m") == ()
    index.loaded("m", 1)
    index.loading("m", 2)
    assert told(index) == [("m", 1, "READY", ""), ("m", 2, "LOADING", "")]
    index.loaded("m", 2)
    index.unloading("m", 1)
    index.unloaded("m", 1)
    assert told(index) == [("m", 1, "UNAVAILABLE", "unloaded"), ("m", 2, "READY", "")]
    assert index.ready("m") == (2,)
    assert [each.version for each in index.entries(ready_only=True)] == [2]


def test_a_failed_load_leaves_the_old_one_ready_with_the_reason():
    index = RepositoryIndex()
    index.loaded("m", 1)
    index.loading("m", 1)
    index.failed("m", "cut off", 1)
    assert told(index) == [("m", 1, "READY", "cut off")]
    index.failed("m", "config.pbtxt:1:1")
    index.failed("n", "no version")
    index.failed("n", "cut off", 3)
    assert told(index) == [("m", 1, "READY", "cut off"), ("n", 3, "UNAVAILABLE", "cut off")]
    index.loaded("m", 1)
    assert told(index)[0] == ("m", 1, "READY", "")
    assert index.entries()[1].state is ModelState.UNAVAILABLE


def test_a_model_whose_folder_is_gone_leaves_when_nothing_of_it_is_ready():
    index = RepositoryIndex()
    index.loaded("m", 1)
    index.found([])
    assert index.ready("m") == (1,)
    index.unloaded("m", 1)
    index.found([])
    assert index.entries() == []
