"""The store of what clients left: tenants apart, places kept, time and room limited, one server at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from maitred.core.errors import ConfigError, Unavailable
from maitred.storage.state import PAGE_BYTES, ContentPiece, EntryKey, StateStore


@pytest.fixture
def store():
    store = StateStore()
    yield store
    store.close()


def test_an_entry_is_its_tenants_alone(store):
    store.put("file", "f1", "ada", b"{}", b"lines", now=1.0)
    found = store.get("file", "f1", "ada", 2.0)
    assert found is not None
    assert (found.about, found.created_at) == (b"{}", 1.0)
    assert store.content("file", "f1", "ada") == b"lines"
    assert store.get("file", "f1", "bob", 2.0) is None
    assert store.content("file", "f1", "bob") == b""
    assert store.get("batch", "f1", "ada", 2.0) is None
    assert not store.drop("file", "f1", "bob")
    assert store.drop("file", "f1", "ada")
    assert store.get("file", "f1", "ada", 2.0) is None


def test_a_change_keeps_place_time_and_content(store):
    for number, name in enumerate("abc"):
        store.put("batch", name, "", b"new", b"content", now=float(number))
    store.put("batch", "a", "", b"done", now=9.0)
    first = store.entries("batch", "", 9.0, newest=False)[0]
    assert (first.id, first.about, first.created_at) == ("a", b"done", 0.0)
    assert store.content("batch", "a", "") == b"content"


def test_lists_go_on_where_a_page_ended(store):
    for number in range(5):
        store.put("response", f"r{number}", "ada", b"", now=0.0)
        store.put("response", f"r{number}", "bob", b"", now=0.0)
    assert [entry.id for entry in store.entries("response", "ada", 0.0, limit=2)] == ["r4", "r3"]
    assert [entry.id for entry in store.entries("response", "ada", 0.0, after="r3", limit=2)] == ["r2", "r1"]
    assert [entry.id for entry in store.entries("response", "ada", 0.0, after="r3", newest=False)] == ["r4"]


def test_what_is_over_is_not_there(store):
    store.put("response", "old", "", b"", now=0.0, expires_at=10.0)
    assert store.get("response", "old", "", 9.9) is not None
    assert store.get("response", "old", "", 10.0) is None
    assert store.entries("response", "", 10.0) == []
    store.put("response", "new", "", b"", now=11.0)
    assert not store.drop("response", "old", "")


def test_memory_forgets_the_oldest_first():
    store = StateStore(max_memory_bytes=100)
    for number in range(5):
        store.put("response", f"r{number}", "", b"x" * 10, b"y" * 30, now=0.0)
    assert [entry.id for entry in store.entries("response", "", 0.0)] == ["r4", "r3"]
    store.close()


def test_a_folder_outlives_the_server_and_has_one_at_a_time(tmp_path: Path):
    folder = str(tmp_path / "state")
    store = StateStore(folder)
    store.put("file", "f1", "ada", b"{}", b"lines", now=1.0)
    with pytest.raises(ConfigError, match="--state-dir"):
        StateStore(folder)
    store.close()
    again = StateStore(folder)
    assert again.content("file", "f1", "ada") == b"lines"
    assert not (tmp_path / "state/state.sqlite-wal").stat().st_size, "on a full disk it could not be read"
    again.close()
    file = tmp_path / "state/state.sqlite"
    file.write_bytes(file.read_bytes()[:4096] + b"damaged" * 5000)
    damaged = StateStore(folder)
    with pytest.raises(Unavailable, match="could not be read"):
        damaged.busy("batch")
    damaged.close()
    file.write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="cannot be used"):
        StateStore(folder)


def test_an_entry_has_pieces_in_parts_which_are_read_in_order(store):
    batch, file = EntryKey("batch", "b", "ada"), EntryKey("file", "f", "ada")
    store.put(*batch, b"{}", now=0.0)
    store.add(batch, [ContentPiece(number, b"line %d" % number) for number in range(4)])
    store.add(batch, [ContentPiece(2, b"answer")], part=1)
    store.clear(batch, 0, [2])
    assert [piece.number for piece in store.pieces(batch)] == [0, 1, 3]
    assert store.pieces(batch, after=1) == [ContentPiece(3, b"line 3")]
    assert store.pieces(batch._replace(tenant="bob")) == []
    store.put(*file, b"{}", now=0.0)
    store.move(batch, 1, file)
    assert (store.pieces(file), store.size(file), store.size(batch)) == ([ContentPiece(2, b"answer")], 6, 18)
    assert store.size(batch, 1) == 0
    store.add(file, [ContentPiece(2, b"other answer")])
    assert store.size(file) == 12
    store.drop(*file)
    assert (store.pieces(file), store.size(file)) == ([], 0)


def test_an_upload_becomes_a_file_without_a_byte_of_it_written_again(store):
    upload, file = EntryKey("upload", "u", "ada"), EntryKey("file", "f", "ada")
    store.put(*upload, b"", now=0.0, expires_at=5.0, busy=True)
    store.add(upload, [ContentPiece(number, b"line %d" % number) for number in range(4)])
    num_changes = store._db.total_changes
    store.rename(upload, file, b"{}", expires_at=None)
    assert store._db.total_changes == num_changes + 1
    assert (store.get(*upload, 0.0), store.pieces(upload), store.busy("upload")) == (None, [], [])
    assert store.get(*file, 9.0).about == b"{}"
    assert [piece.content for piece in store.pieces(file)] == [b"line %d" % number for number in range(4)]


def test_no_call_is_short_while_a_thread_is_at_work_or_memory_is_full():
    store = StateStore(max_memory_bytes=100)

    def is_short(num_bytes: int) -> bool:
        with store.at_once(num_bytes) as found:
            return found

    with ThreadPoolExecutor(1) as pool:
        assert (is_short(60), is_short(101)) == (True, False)
        with store.together():
            assert pool.submit(is_short, 60).result() is False
        with store.at_once(60):
            assert pool.submit(is_short, 60).result() is False, "and that call is alone"
        assert pool.submit(is_short, 60).result() is True
    store.close()


def test_pieces_are_read_a_page_at_a_time(store):
    file = EntryKey("file", "f", "")
    store.put(*file, b"{}", now=0.0)
    store.add(file, [ContentPiece(number, b"x" * (PAGE_BYTES // 2)) for number in range(3)])
    assert [piece.number for piece in store.pieces(file)] == [0, 1]
    assert [piece.number for piece in store.pieces(file, after=1)] == [2]


def test_changes_made_together_are_stored_all_or_none(store):
    file = EntryKey("file", "f", "")

    def interrupted():
        with store.together():
            store.put(*file, b"{}", now=0.0)
            store.add(file, [ContentPiece(0, b"x")])
            store.add(EntryKey("file", "no such", ""), [ContentPiece(0, b"x")])

    with pytest.raises(Unavailable, match="could not be written"):
        interrupted()
    assert store.get(*file, 0.0) is None
    store.put(*file, b"{}", now=0.0)
    assert store.pieces(file) == []


def test_memory_keeps_what_is_under_way_and_counts_pieces():
    store = StateStore(max_memory_bytes=100)
    running, file = EntryKey("batch", "b", ""), EntryKey("file", "f", "")
    store.put(*running, b"", now=0.0, busy=True)
    store.put(*file, b"", now=0.0)
    store.add(file, [ContentPiece(0, b"x" * 50)])
    store.add(running, [ContentPiece(0, b"y" * 60)])
    assert store.get(*file, 0.0) is None
    assert [entry.id for entry in store.busy("batch")] == ["b"]
    with pytest.raises(Unavailable, match="--state-dir"):
        store.add(running, [ContentPiece(1, b"y" * 60)])
    assert len(store.pieces(running)) == 1
    store.put(*running, b"", now=0.0)
    store.put("response", "r", "", b"", b"z" * 60, now=0.0)
    assert (store.pieces(running), store.busy("batch")) == ([], [])
    store.close()


def test_a_list_may_be_of_one_purpose(store):
    for number, purpose in enumerate(("batch", "user_data", "batch")):
        store.put("file", f"f{number}", "", b'{"purpose":"%s"}' % purpose.encode(), now=0.0)
    assert [entry.id for entry in store.entries("file", "", 0.0, purpose="batch")] == ["f2", "f0"]


def test_what_was_put_outlives_a_change_that_fails(store):
    for number in range(40):
        store.put("response", f"r{number}", "", b"", now=0.0)
    with pytest.raises(Unavailable, match="could not be written"):
        store.add(EntryKey("file", "no such", ""), [ContentPiece(0, b"x")])
    assert [entry.id for entry in store.entries("response", "", 0.0, newest=False)] == [f"r{n}" for n in range(40)]
