"""Whatever happens in whatever order: no block is lost, every row reads its own history, everybody finishes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.cost_model import CostModel, Knot, SwapCosts
from maitred.core.request import FinishReason, RequestState, SamplingParams
from maitred.core.step import RequestProgress, ScheduledRow, SchedulerOutput
from maitred.kv.manager import PoolRow
from maitred.kv.pages import groups_of
from maitred.kv.states import StatefulKVCacheManager
from maitred.policy.policies import POLICIES
from maitred.scheduler.reservations import ReservedBlocks
from maitred.scheduler.scheduler import Scheduler
from tests.fakes import make_request, make_samples, make_scheduler, token_at
from tests.scheduler.checking import CheckingExecutor

EOS, STOP_TOKEN = 1, 2


def token_or_end(request_id: str, position: int) -> int:
    """Some requests meet an end-of-sequence or stop token on their way."""
    token = token_at(request_id, position)
    return {0: EOS, 1: STOP_TOKEN}.get(token % 23, token)


def expected_output(request: RequestState) -> tuple[list[int], FinishReason]:
    """The slow obvious way: ask for one token after another."""
    tokens: list[int] = []
    sampling = request.spec.sampling
    while len(tokens) < request.max_tokens:
        tokens.append(token_or_end(request.request_id, request.num_prompt_tokens + len(tokens)))
        ends = (tokens[-1] == EOS and not sampling.ignore_eos) or tokens[-1] in sampling.stop_token_ids
        if ends and len(tokens) >= sampling.min_tokens:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


@dataclass
class World:
    """A scheduler under random load; `chooser` decides everything, so a run is a function of its seed."""

    chooser: Random
    scheduler: Scheduler
    executor: CheckingExecutor
    block_size: int
    largest: int  # tokens that a request may come to
    now: float = 0.0
    draining: bool = False
    with_kv_from_elsewhere: bool = False
    background_share: float = 0.0

    def __post_init__(self) -> None:
        self.requests: list[RequestState] = []
        self.told: dict[str, list[RequestProgress]] = {}
        self.texts: list[list[int]] = [[token_at("shared", i) for i in range(self.largest)]]
        self.coming: dict[str, ReservedBlocks] = {}  # by request
        self.leases: dict[str, tuple[list[PoolRow], list[list[int | None]]]] = {}  # rows, and what is in them
        self.seen: Counter[str] = Counter()

    def a_prompt(self, max_tokens: int) -> list[int]:
        """Mostly the beginning of something said before, so that prefixes are hit, partly or whole."""
        text = self.chooser.choice(self.texts)
        shared = text[: self.chooser.randint(0, len(text))]
        tail = [1000 + self.chooser.randrange(9) for _ in range(self.chooser.randint(0, 6))]
        return (shared + tail)[: self.largest - max_tokens] or [7]

    def add(self, samples: int) -> None:
        max_tokens = self.chooser.randint(1, min(8, self.largest - 1))
        fields = {
            "prompt": self.a_prompt(max_tokens),
            "max_tokens": max_tokens,
            "arrived_at": self.now,
            "block_size": self.block_size,
            "priority": self.chooser.randint(0, 2),
            "background": self.background_share > 0.0 and self.chooser.random() < self.background_share,
            "eos_token_ids": (EOS,),
            "sampling": SamplingParams(
                max_tokens=max_tokens,
                min_tokens=self.chooser.randint(0, max_tokens),
                ignore_eos=self.chooser.random() < 0.3,
                stop_token_ids=(STOP_TOKEN,),
                prompt_logprobs=0 if self.chooser.random() < 0.1 else None,
            ),
        }
        name = f"r{len(self.requests)}"
        new = make_samples(name, samples, **fields) if samples > 1 else [make_request(name, **fields)]
        for request in new:
            self.requests.append(request)
            self.scheduler.add(request, self.now)
            self.scheduler.check_invariants()

    def step(self) -> None:
        self.now += self.chooser.random()
        could_step = self.scheduler.can_step
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_invariants()
        self.check_limits(plan)
        assert could_step == bool(plan.rows) or self.note_given_up()
        self.note_given_up()
        output = self.executor.execute(plan)
        self.check_leases()
        if not self.draining and self.chooser.random() < 0.1:
            self.end_one()  # between the plan and its outcome
        self.now += 0.1
        for progress in self.scheduler.update(plan, output, self.now):
            self.told.setdefault(progress.request_id, []).append(progress)
        self.scheduler.check_invariants()

    def check_limits(self, plan: SchedulerOutput) -> None:
        config = self.scheduler.config
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.rows) <= config.max_num_seqs
        assert all(row.num_tokens >= 1 for row in plan.rows)
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)

    def end_one(self) -> None:
        living = [r for r in self.requests if not r.finished]
        if living:
            request = self.chooser.choice(living)
            reason = self.chooser.choice([FinishReason.ABORT, FinishReason.STOP])
            progress = self.scheduler.finish(request.request_id, reason, self.now, stop_reason="found outside")
            assert progress is not None
            assert progress.finish_reason is reason
            assert request.block_table == []
            self.note_given_up()
            self.scheduler.check_invariants()

    def reserve(self) -> None:
        """For any request, wherever it stands: it may be the wrong one to ask for."""
        waiting = self.chooser.random() < 0.8 and self.scheduler.waiting
        living = waiting or [r for r in self.requests if not r.finished]
        if living:
            request = self.chooser.choice(living)
            before = self.scheduler.stats
            reserved = self.scheduler.reserve(request.request_id, self.chooser.randint(0, self.largest), self.now)
            if reserved is None:
                assert self.scheduler.stats == before
            else:
                assert reserved.start < reserved.end < request.num_tokens
                assert len(reserved.block_ids) * self.block_size == reserved.end - reserved.start
                self.coming[request.request_id] = reserved
                self.executor.spoil(self.rows(request, reserved.start, reserved.end))
                self.seen["reserved"] += 1
                self.seen["fellows"] += len(self.scheduler.waiting_for_kv) > len(self.coming)
            self.scheduler.check_invariants()

    def rows(self, request: RequestState, start: int, end: int) -> list[PoolRow]:
        """Rows of what is reserved for it."""
        return self.scheduler.kv_cache.rows(request.block_table, start // self.block_size, end)

    def arrive(self) -> None:
        """All of what was reserved, the beginning, or nothing; or something for one that does not wait any more."""
        if self.coming:
            request_id = self.chooser.choice(sorted(self.coming))
            start, _, block_ids = self.coming.pop(request_id)
            request = self.scheduler.request(request_id)
            assert request is not None
            num_blocks = self.chooser.choice([0, len(block_ids), self.chooser.randint(0, len(block_ids))])
            came = start // self.block_size + num_blocks
            rows = self.rows(request, start, start + len(block_ids) * self.block_size)
            self.executor.write([row for row in rows if row.place < came], request)
            assert self.scheduler.kv_arrived(request_id, start + num_blocks * self.block_size, self.now)
            self.seen["arrived"] += num_blocks > 0
        elif self.requests:
            assert not self.scheduler.kv_arrived(self.chooser.choice(self.requests).request_id, 0, self.now)
        self.scheduler.check_invariants()

    def hold(self) -> None:
        if self.requests:
            lease, request = f"lease {self.chooser.randint(0, 3)}", self.chooser.choice(self.requests)
            blocks = self.scheduler.hold(lease, request.block_hashes, self.now)
            if blocks:
                rows = self.scheduler.kv_cache.rows(blocks, 0, len(blocks) * self.block_size)
                self.leases[lease] = rows, self.executor.contents(rows)
            self.scheduler.check_invariants()

    def release(self) -> None:
        lease = f"lease {self.chooser.randint(0, 3)}"
        assert self.scheduler.release(lease, self.now) == (self.leases.pop(lease, None) is not None)
        self.scheduler.check_invariants()

    def note_given_up(self) -> bool:
        """Nobody writes to what is given up, nor expects to find it."""
        given_up = self.scheduler.given_up
        for request_id in given_up.request_ids:
            self.seen["given up"] += self.coming.pop(request_id, None) is not None
        for lease in given_up.leases:
            self.seen["leases given up"] += self.leases.pop(lease, None) is not None
        return given_up != ((), ())

    def check_leases(self) -> None:
        """What is held stays what it was."""
        for rows, contents in self.leases.values():
            assert self.executor.contents(rows) == contents

    def reconfigure(self) -> None:
        seqs = self.chooser.randint(1, 5)
        config = replace(
            self.scheduler.config,
            policy=self.chooser.choice(sorted(POLICIES)),
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + self.chooser.randint(0, 8),
        )
        self.scheduler.configure(config)
        self.scheduler.check_invariants()

    def act(self) -> None:
        chance = self.chooser.random()
        if chance < 0.25:
            self.add(1)
        elif chance < 0.32:
            self.add(self.chooser.randint(2, 4))
        elif chance < 0.38:
            self.end_one()
        elif chance < 0.40:
            self.reconfigure()
        elif chance < 0.41:
            self.scheduler.set_swap_costs(costs_at_random(self.chooser))
            if self.background_share:
                self.scheduler.set_step_costs(step_costs_at_random(self.chooser))
        elif chance < 0.60 and self.with_kv_from_elsewhere:
            self.chooser.choice([self.reserve, self.reserve, self.arrive, self.hold, self.release])()
        else:
            self.step()
        if self.requests and chance < 0.1:  # a next turn of a conversation
            said = self.chooser.choice(self.requests)
            self.texts.append([*said.spec.prompt_token_ids, *said.output_token_ids][: self.largest])

    def drain(self) -> None:
        self.draining = True  # nobody is helped out by an abort
        bound = 50 + 4 * sum(r.num_prompt_tokens + r.max_tokens for r in self.requests)
        for _ in range(bound):
            if not self.scheduler.has_work:
                return self.end_leases()
            if self.coming and (not self.scheduler.can_step or self.chooser.random() < 0.1):
                self.arrive()
            self.step()
        raise AssertionError(f"still busy after {bound} steps: {self.scheduler.stats}")

    def end_leases(self) -> None:
        for lease in self.leases:
            assert self.scheduler.release(lease, self.now)

    def check_outcomes(self) -> None:
        stats = self.scheduler.stats
        assert stats.num_blocks_used == stats.num_running == stats.num_waiting == 0
        assert sum(stats.num_finished.values()) == len(self.requests)
        for request in self.requests:
            told = self.told.get(request.request_id, [])
            tokens = [token for progress in told for token in progress.new_token_ids]
            assert tokens == request.output_token_ids
            expected, reason = expected_output(request)
            if request.stop_reason == "found outside":
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, request.finish_reason) == (expected, reason)
                assert told[-1].finish_reason is reason
                assert told[-1].timing is not None
                assert request.stop_reason == (STOP_TOKEN if tokens[-1] == STOP_TOKEN and reason == "stop" else None)
                self.check_prompt_logprobs(request, told)

    def check_prompt_logprobs(self, request: RequestState, told: list[RequestProgress]) -> None:
        given = [entry.token_ids[0] for progress in told for entry in progress.prompt_logprobs or ()]
        wanted = request.spec.prompt_token_ids[1:] if request.spec.sampling.prompt_logprobs is not None else []
        assert given == list(wanted)


def costs_at_random(chooser: Random) -> SwapCosts | None:
    """Copying is worth it always, for some, or never."""
    bandwidth = chooser.choice([1e12, 1e12, 30.0, 1e-3])
    return chooser.choice([None, SwapCosts(16, bandwidth, bandwidth, 0.25), SwapCosts(16, bandwidth, bandwidth, 0.25)])


def step_costs_at_random(chooser: Random) -> CostModel:
    """A step of some tokens takes as long as one, or each takes its time; or little is known."""
    slow = CostModel(fixed_s=0.02, decode_token_s=chooser.choice([1e-4, 0.01]), prefill_token_s=0.002)
    return chooser.choice([slow, CostModel(weights_s=0.5), CostModel(steps=(Knot(2, 0.1), Knot(9, 0.2)))])


def some_drafts(request: RequestState, num_rows: int) -> int:
    return (3 * request.num_tokens + num_rows) % 5


def draft_right_or_wrong(request_id: str, position: int) -> int:
    return token_or_end(request_id, position) if token_at(request_id, -position) % 3 else 0


def some_forced(request_id: str, position: int) -> int:
    return token_at(request_id, position) % 7


def postponing_some() -> Callable[[str, int], bool]:
    """Each at most twice."""
    asked: Counter[tuple[str, int]] = Counter()

    def postponed(request_id: str, position: int) -> bool:
        asked[request_id, position] += 1
        return asked[request_id, position] <= token_at(request_id, position) % 9 - 6

    return postponed


def make_world(
    chooser: Random,
    with_kv_from_elsewhere: bool = False,
    with_windows: bool = False,
    with_states: bool = False,
    with_background: bool = False,
) -> World:
    block_size = chooser.choice([1, 2, 3, 4])
    num_blocks = chooser.randint(4, 20)
    groups = None
    if with_windows:
        windows = [chooser.choice([None, None, 1, 3, 6, 11]) for _ in range(chooser.randint(1, 5))]
        groups = groups_of([*windows, chooser.choice([2, 5, 9])], 1024)
        assert groups is not None
        num_blocks = max(num_blocks * chooser.randint(1, 4), groups.pages_for(4 * block_size, block_size))
    seqs = chooser.randint(1, 6)
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + chooser.randint(0, 12),
        policy=chooser.choice(sorted(POLICIES)),
        ageing_s=chooser.choice([0.5, 3.0, 100.0]),
        quantum_tokens=chooser.choice([1, 4, 128]),
        enable_prefix_caching=chooser.random() < 0.85,
        num_host_blocks=chooser.choice([0, 2, 5, 50]),
        num_drafts=chooser.choice([None, some_drafts, lambda request, num_rows: 4]),
        groups=groups,
        num_state_slots=seqs + chooser.choice([0, 1, 2, 5, 20]) if with_states else 0,
    )
    if isinstance(scheduler.kv_cache, StatefulKVCacheManager):
        scheduler.kv_cache.stride = chooser.choice([2, 5, 9, 512])
    scheduler.set_swap_costs(costs_at_random(chooser))
    largest = num_blocks * block_size  # a request may need the whole cache
    if groups is not None:
        largest = min(groups.tokens_for(num_blocks, block_size, 120), scheduler.kv_cache.num_blocks * block_size)
    draft_at = chooser.choice([token_or_end, draft_right_or_wrong, lambda request_id, position: 0])
    executor = CheckingExecutor(block_size, token_or_end, draft_at, groups)
    executor.forced_after = chooser.choice([some_forced, lambda request_id, position: 0])
    executor.postponed = chooser.choice([postponing_some(), lambda request_id, position: False])
    world = World(chooser, scheduler, executor, block_size, largest, with_kv_from_elsewhere=with_kv_from_elsewhere)
    world.background_share = chooser.choice([0.3, 0.6, 1.0]) if with_background else 0.0
    return world


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_acts=st.integers(1, 80),
    with_kv_from_elsewhere=st.booleans(),
    with_background=st.booleans(),
)
def test_any_interleaving_keeps_all_blocks_accounted_for_and_everybody_finishes(
    seed: int, num_acts: int, with_kv_from_elsewhere: bool, with_background: bool
) -> None:
    world = make_world(Random(seed), with_kv_from_elsewhere, with_background=with_background)
    for _ in range(num_acts):
        world.act()
    world.drain()
    world.check_outcomes()


@settings(max_examples=25, deadline=None)
@given(chooser=st.randoms(use_true_random=False), num_acts=st.integers(1, 80), with_kv_from_elsewhere=st.booleans())
def test_layers_of_windows_have_the_pages_that_they_see(
    chooser: Random, num_acts: int, with_kv_from_elsewhere: bool
) -> None:
    world = make_world(chooser, with_kv_from_elsewhere, with_windows=True, with_background=num_acts % 2 == 0)
    for _ in range(num_acts):
        world.act()
    world.drain()
    world.check_outcomes()


def run_with_states(seed: int, num_acts: int) -> Counter[str]:
    """A world of a model with recurrent layers, whose states the executor checks; what was seen in it."""
    world = make_world(Random(seed), with_states=True, with_background=seed % 3 == 2)
    for _ in range(num_acts):
        world.act()
    world.drain()
    world.check_outcomes()
    kv, plans = world.scheduler.kv_cache, world.executor.plans
    assert isinstance(kv, StatefulKVCacheManager)
    resumed = [plan.state_copies for plan in plans if any(new.num_output_tokens for new in plan.new_requests)]
    drafted = [row for plan in plans for row in plan.rows if row.num_drafts]
    saves, hits = (sum(len(getattr(plan, name)) for plan in plans) for name in ("state_saves", "state_copies"))
    counts = {"saves": saves, "hits": hits, "drafts": len(drafted), "evicted": kv.num_evictions}
    return Counter(counts | {"resumed": sum(map(len, resumed))})


def test_states_are_those_of_the_tokens_before_them_whatever_happens() -> None:
    """Prefix hits, drafts, preemption, chunks, aborts and samples in random worlds; `make soak` runs a thousand."""
    seen = sum((run_with_states(seed, 1 + seed % 80) for seed in range(60)), Counter[str]())
    assert min(seen.values()) > 20, seen


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_states_are_those_of_the_tokens_before_them_in_a_thousand_worlds() -> None:
    seen = sum((run_with_states(seed, 20 + seed % 400) for seed in range(1000)), Counter[str]())
    assert min(seen.values()) > 1000, seen


def test_long_runs_of_random_load() -> None:
    rows: list[ScheduledRow] = []
    num_accepted = num_preemptions = num_forced = 0
    for seed in range(10):
        world = make_world(Random(seed))
        for _ in range(400):
            world.act()
        world.drain()
        world.check_outcomes()
        drafted = [row for plan in world.executor.plans for row in plan.rows if row.num_drafts]
        rows += drafted
        answers = [len(told.new_token_ids) - told.num_forced for each in world.told.values() for told in each]
        num_accepted += sum(num_tokens - 1 for num_tokens in answers if num_tokens)
        num_forced += sum(told.num_forced for each in world.told.values() for told in each)
        num_preemptions += world.scheduler.stats.num_preemptions if drafted else 0
    assert 200 < num_accepted < sum(row.num_drafts for row in rows) - 200
    assert any(row.num_known > 1 for row in rows)
    assert num_preemptions > 50
    assert num_forced > 200


@pytest.mark.parametrize("with_windows", [False, True])
def test_long_runs_in_which_kv_comes_from_elsewhere_and_is_held_for_others(with_windows: bool) -> None:
    """It comes whole, in part or not at all; out of blocks, what is set aside is given up, and nobody notices."""
    seen: Counter[str] = Counter()
    for seed in range(10):
        world = make_world(Random(seed), with_kv_from_elsewhere=True, with_windows=with_windows)
        for _ in range(150 if with_windows else 400):
            world.act()
        world.drain()
        world.check_outcomes()
        seen += world.seen
        seen["swapped in"] += sum(len(plan.swap_ins) for plan in world.executor.plans)
    assert seen["swapped in"] > 10
    least = 5 if with_windows else 20
    assert min(seen[what] for what in ("reserved", "arrived", "fellows", "given up", "leases given up")) > least, seen
