"""KV tiers beside a real engine: what was computed once is fetched, and whatever goes wrong is computed again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import pytest

from maitred.core.request import Terms
from maitred.kv import keeping
from maitred.kv.disk import open_kv_disk
from maitred.kv.host import KVHost
from maitred.kv.prefix_cache import Changes
from maitred.kv.tiers import FetchMeter, KVTier, TierStats, row_key
from tests.kv.engines import PROMPT, Engine, engines
from tests.model.checkpoints import make_checkpoint


class DictTier(KVTier):
    """Keeps blocks in a dict. `before_read`, `before_write` are called in the threads that do so."""

    name = "dict"

    def __init__(self, bytes_per_block: int) -> None:
        self.bytes_per_block, self.stats = bytes_per_block, TierStats()
        self.blocks: dict[bytes, bytes] = {}
        self.before_read: Callable[[], None] = lambda: None
        self.before_write: Callable[[], None] = lambda: None

    def tell_changes(self, wanted: bool) -> None:
        self.changes = Changes(self.blocks) if wanted else None

    def num_known(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def read(self, keys: Sequence[bytes], into: memoryview) -> int:
        self.before_read()
        size = self.bytes_per_block
        for i, key in enumerate(keys):
            if key not in self.blocks:
                return i
            into[i * size : (i + 1) * size] = self.blocks[key]
        return len(keys)

    def write(self, keys: Sequence[bytes], rows: memoryview) -> int:
        self.before_write()
        size = self.bytes_per_block
        for i, key in enumerate(keys):
            self.blocks[key] = bytes(rows[i * size : (i + 1) * size])
            if self.changes is not None:
                self.changes.stored(key)
        return len(keys)

    def clear(self) -> int:
        count = len(self.blocks)
        for key in self.blocks if self.changes is not None else ():
            self.changes.removed(key)
        self.blocks.clear()
        return count


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    with engines(make_tier=DictTier) as one:
        yield one


SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.9, "n": 4})


@pytest.mark.parametrize(
    ("speculative", "sampling"),
    [
        pytest.param(speculative, sampling, marks=() if row == column else pytest.mark.soak)
        for row, speculative in enumerate(("off", "mtp", "draft"))
        for column, sampling in enumerate(SAMPLINGS)
    ],
)
def test_a_new_engine_goes_on_with_what_another_computed(make, sampling, speculative):
    first = make(speculative=speculative)
    said = first.complete("a", **sampling)
    assert first.cached[0] == 0
    again = make(first.tier, speculative=speculative)
    assert again.complete("b", **sampling) == said
    assert again.cached[0] == 192  # all whole blocks before the last token
    turn = [*PROMPT, *said[0], 5, 6, 7]
    third = make(first.tier, speculative=speculative)
    found = third.complete("c", turn, **sampling)
    assert third.cached[0] == 208, "what the answer filled is there too"
    plain = make(speculative=speculative)
    assert plain.complete("d", turn, **sampling) == found
    assert third.tiers.figures()["kv_tiers"].tiers["dict"].hit_tokens == 208


def test_unlike_salts_share_nothing(make):
    engine = make()
    engine.complete("a")
    other = make(engine.tier)
    other.add("b", cache_salt="theirs")
    assert not len(other.tiers.fetches)


def test_an_abort_while_it_is_fetched_frees_its_blocks(make):
    first = make()
    first.complete("a")
    again, let_go = make(first.tier), threading.Event()
    reading = threading.Event()
    again.tier.before_read = lambda: (reading.set(), let_go.wait(20))[0]
    (name,) = again.add("b")
    assert reading.wait(20)
    assert again.core.abort(name) is not None
    assert again.core.stats.num_blocks_used == 0
    let_go.set()
    assert again.complete("c") == first.complete("d")


def test_a_tier_that_raises_or_forgets_is_computed_around(make):
    first = make()
    said = first.complete("a")
    again = make(first.tier)
    wrong = iter([OSError("gone"), None])

    def fail() -> None:
        if (error := next(wrong, None)) is not None:
            raise error

    again.tier.before_read = fail
    assert again.complete("b") == said
    assert again.cached == [0]
    del again.tier.blocks[list(again.tier.blocks)[5]]
    third = make(again.tier)
    assert third.complete("c") == said
    assert third.cached == [5 * 16]


def test_a_tier_that_hangs_is_left_alone(make, monkeypatch):
    monkeypatch.setattr(keeping, "PATIENCE_S", 0.05)
    first = make()
    said = first.complete("a")
    again, let_go = make(first.tier), threading.Event()
    again.tier.before_read = lambda: let_go.wait(20)
    assert again.complete("b") == said
    assert again.cached == [0]
    assert again.complete("c", [9, *PROMPT])
    let_go.set()


def test_what_is_fetched_is_given_up_before_a_running_request_is_preempted(make):
    first = make(num_blocks=32)
    said = first.complete("a")
    again, reading, let_go = make(first.tier, num_blocks=32), threading.Event(), threading.Event()
    again.tier.before_read = lambda: (reading.set(), let_go.wait(20))[0]
    (running,) = again.add("b", list(range(1000, 1000 + 19 * 16 - 2)))
    again.step()
    (fetched,) = again.add("c")
    assert reading.wait(20)
    while len(again.tiers.fetches):
        again.step()  # until the growing answer needs a block of the reserved ones
    assert again.core.has_work
    let_go.set()
    again.run()
    assert again.core.stats.num_preemptions == 0
    assert again.tokens[fetched] == said[0]
    assert len(again.tokens[running]) == 24


def test_a_fetch_that_is_slower_than_computing_is_abandoned_and_what_came_counts(make, monkeypatch):
    first = make()
    monkeypatch.setattr(keeping, "PIECE_BYTES", 2 * first.tier.bytes_per_block)
    said = first.complete("a")
    again = make(first.tier)
    again.tier.before_read = lambda: again.clock.advance(10.0)
    assert again.complete("b") == said
    assert again.cached == [2 * 16]
    assert again.tiers.tier_views()[0].bytes_per_s < 2e5, "and the next one knows"


def test_a_request_that_lacks_blocks_is_fetched_when_another_has_ended(make):
    first = make(num_blocks=32)
    said = first.complete("a")
    again = make(first.tier, num_blocks=32)
    (running,) = again.add("b", list(range(1000, 1000 + 22 * 16 - 2)))
    again.step()
    (name,) = again.add("c")
    state = again.core.scheduler.request(name)
    assert not len(again.tiers.fetches), "blocks lack"
    again.run()
    assert state.num_cached_tokens == 192
    assert again.tokens[name] == said[0]
    assert len(again.tokens[running]) == 24


def test_a_deadline_ends_a_request_that_waits_for_kv(make):
    first = make()
    first.complete("a")
    again, reading, let_go = make(first.tier), threading.Event(), threading.Event()
    again.tier.before_read = lambda: (reading.set(), let_go.wait(20))[0]
    again.add("b", terms=Terms(finish_by=again.core.clock.now()))
    assert reading.wait(20)
    again.core.step()
    assert again.core.stats.num_blocks_used == 0
    assert not again.core.has_work
    let_go.set()
    assert again.complete("c") == first.complete("d")


def test_storage_that_hangs_holds_no_blocks_and_is_not_waited_for_at_the_end(make, monkeypatch):
    monkeypatch.setattr(keeping, "DRAIN_S", 0.05)
    engine, let_go = make(), threading.Event()
    engine.tier.before_write = lambda: let_go.wait(20)
    engine.add("a")
    engine.run()
    engine.hear(lambda: not engine.core.stats.num_blocks_used)  # they are copied
    engine.tiers.close()
    assert engine.tiers.tier_views()[0].waiting_blocks == 13
    let_go.set()


def test_a_storage_that_raises_is_tried_again_with_the_next_request(make):
    engine = make()
    wrong = iter([OSError("gone")])

    def fail() -> None:
        if (error := next(wrong, None)) is not None:
            raise error

    engine.tier.before_write = fail
    engine.complete("a")
    assert not engine.tier.blocks
    engine.complete("b")
    assert len(engine.tier.blocks) == 13


def test_samples_of_a_prompt_store_it_once(make):
    engine, written = make(), []
    write = engine.tier.write
    engine.tier.write = lambda keys, *rest: written.extend(keys) or write(keys, *rest)
    engine.complete("a", temperature=0.9, n=4)
    assert len(written) == len(set(written))


def test_tiers_are_emptied_behind_what_is_being_stored(make):
    engine, told = make(), []
    engine.add("a")
    engine.run()
    engine.tiers.clear_tiers(told.append)
    engine.hear(lambda: told)
    engine.rest()
    assert not engine.tier.blocks
    assert make(engine.tier).complete("b") == engine.complete("c")


def test_storage_that_lags_is_not_waited_for(make):
    engine = make()
    engine.tiers._staging_bytes = 1
    let_go = threading.Event()
    engine.tier.before_write = lambda: let_go.wait(20)
    for number in range(3):
        engine.add(f"r{number}", [number, *PROMPT])
    engine.run()
    assert engine.tiers.figures()["kv_tiers"].tiers["dict"].dropped["lagged"] > 0
    let_go.set()
    engine.rest()
    assert engine.core.stats.num_blocks_used == 0


def test_blocks_of_pool_and_tiers_are_told_once_and_until_they_are_in_neither(make):
    first = make()
    first.complete("before")
    tier, told = first.tier, set()
    engine = make(tier, num_blocks=24)
    engine.core.tell_router(True)

    def hear() -> None:
        while engine.core.block_changes:
            stored, removed = engine.core.block_changes.take(5)
            assert told.isdisjoint(stored)
            assert told.issuperset(removed)
            told.update(stored)
            told.difference_update(removed)

    hear()
    assert told == set(tier.blocks) != set(), "what lies there is told before anybody asks for it"
    for number in range(4):  # more than the pool holds
        engine.complete(f"another {number}", range(number * 200, number * 200 + 200))
        hear()
    assert told == set(tier.blocks)
    tier.clear()
    hear()
    assert told == set(engine.core.scheduler.kv_cache._cache.hashes.values())


@pytest.mark.parametrize("lags", [False, True])
def test_what_a_preempted_request_computed_is_stored_before_it_is_overwritten(make, monkeypatch, lags):
    engine, preempted = make(num_blocks=24), 0
    if lags:
        engine.tiers._room = threading.Semaphore(0)
    names = [engine.add(f"{number}", range(number * 200, number * 200 + 170), max_tokens=60) for number in range(2)]
    states = [engine.core.scheduler.request(name) for (name,) in names]
    while not preempted:
        engine.step()
        preempted = sum(state.num_preemptions for state in states)
    (victim,) = [state for state in states if state.num_preemptions]
    while engine.core.scheduler.request(victim.request_id) is victim and victim.status.value == "waiting":
        engine.step()
    if lags:
        assert engine.tiers.figures()["kv_tiers"].tiers["dict"].dropped["lagged"] > 0
        engine.tiers._room.release(8)
    else:
        engine.rest()
        assert not engine.tier.blocks.keys().isdisjoint(victim.block_hashes), "it has not ended, nor has anybody"
    engine.run()
    engine.rest()
    alone = make(DictTier(engine.tier.bytes_per_block))
    for number, (name,) in enumerate(names):
        alone.complete(name, range(number * 200, number * 200 + 170), max_tokens=60)
        assert alone.tokens[name] == engine.tokens[name]
    assert engine.tier.blocks.items() <= alone.tier.blocks.items()


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_what_the_pool_lost_comes_back_from_host_memory(make: Callable[..., Engine], executor: str):
    engine = make(make_tier=partial(KVHost, 40), num_blocks=20, executor=executor)
    engine.tiers._tiers[0].meter = FetchMeter(bandwidth=1e12, latency_s=0.0)  # quicker than computing
    first = engine.complete("first")
    engine.complete("other", range(700, 900))  # leaves no room for it
    assert engine.complete("again") == first
    assert engine.cached == [192]
    assert engine.tier.stats.num_hits >= 5


# ---- layers of windows, of unlike heads, of latent keys

CHAT = [(7 * i + i * i // 5) % 250 for i in range(120)]
FAMILIES = {
    "gemma3": {"sliding_window": 24},
    "mistral": {"sliding_window": 24},
    "gemma4": {"sliding_window": 24},
    "deepseek_v3": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @cache
    def folder(family: str) -> str:
        sizes = {"max_position_embeddings": 512, **FAMILIES[family]}
        return str(make_checkpoint(family, tmp_path_factory.mktemp(family), seed=3, **sizes))

    return folder


@pytest.fixture
def of_family(make: Callable[..., Engine], folders: Callable[[str], str]) -> Callable[..., Engine]:
    return lambda family, tier=None, **fields: make(
        tier, model=folders(family), block_size=8, **{"num_blocks": 160, **fields}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tier_has_what_the_next_token_sees(of_family: Callable[..., Engine], family: str):
    """The same prompt, the next turn, and the third prompt that parts from others at one place."""
    first, plain = of_family(family), of_family(family, DictTier(0))
    plain.tier.num_known = lambda keys: 0  # finds nothing
    plain.tier.write = lambda keys, rows: len(keys)
    said = first.complete("a", CHAT)
    turn = [*CHAT, *said[0], 5, 6, 7]
    asked = {"again": CHAT, "turn": turn, "second": [*CHAT[:70], 9, 8, 7], "third": [*CHAT[:70], 1, 2, 3, 4]}
    cached = {}
    for name, prompt in asked.items():
        engine = of_family(family, first.tier)
        assert engine.complete(name, prompt) == plain.complete(name, prompt)
        cached[name] = engine.cached[0]
    # Where all layers have windows, a tier does not know how far prompts are alike.
    knows_all = family == "deepseek_v3"
    assert cached == {
        "again": 112,
        "turn": 136,
        "second": 64 if knows_all else 0,
        "third": 0 if family == "mistral" else 64,
    }
    kv = first.core.scheduler.kv_cache
    whole = kv.pages_per_block * 143 // 8
    assert len(of_family(family).tier.blocks) == 0
    lone = of_family(family)
    lone.complete("a", CHAT)
    assert kv.num_rows(0, 136) <= len(lone.tier.blocks) <= (whole if knows_all else 0.75 * whole)


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_window_that_a_tier_lost_is_computed(of_family: Callable[..., Engine], family: str):
    """Whether it is known to lack, or found to lack when it is read."""
    first = of_family(family)
    said = first.complete("a", CHAT)
    hashes = first.specs("look", CHAT)[0].block_hashes
    window = row_key(hashes[13], first.core.scheduler.kv_cache.kinds[1].start)
    row = first.tier.blocks.pop(window)
    lacks = of_family(family, first.tier)
    assert lacks.complete("b", CHAT) == said
    assert lacks.cached == [0]
    first.tier.blocks[window] = row
    torn = of_family(family, first.tier)
    first.tier.before_read = lambda: first.tier.blocks.pop(window, None)
    assert torn.complete("c", CHAT) == said
    assert torn.cached == [0]
    torn.core.findable.tell_changes(True)
    assert len(torn.core.findable.take(1000)[0]) == 143 // 8, "a router is told of blocks, and of no pages"


def test_windows_are_found_on_disk_after_a_restart(of_family: Callable[..., Engine], tmp_path: Path):
    def disk(num_bytes: int) -> KVTier:
        return open_kv_disk(tmp_path / "kv", max_bytes=2**24, bytes_per_block=num_bytes, fingerprint="one")

    first = of_family("gemma3", make_tier=disk)
    said = first.complete("a", CHAT)
    first.close()
    again = of_family("gemma3", make_tier=disk)
    assert again.complete("b", CHAT) == said
    assert again.cached == [112]
    again.close()
    for rows in (tmp_path / "kv").glob("*.kv"):
        rows.write_bytes(rows.read_bytes()[: rows.stat().st_size // 2])
    short = of_family("gemma3", make_tier=disk)
    assert short.complete("c", CHAT) == said
    assert short.tier.stats.dropped["torn"] > 0
