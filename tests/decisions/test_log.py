"""A recorded run, fed to a fresh scheduler, gives the same plans; and so does a simulator on the same log."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import msgspec
import pytest
from msgspec import structs

from maitred.core.clock import ManualClock
from maitred.core.cost_model import CostModel, SwapCosts
from maitred.core.errors import ConfigError
from maitred.core.request import NO_TERMS, FinishReason, RequestState, ResumePoint, SamplingParams
from maitred.core.step import ModelOutput, RequestProgress, SchedulerOutput
from maitred.decisions.codec import Header, LogEncoder, read_log
from maitred.decisions.log import (
    Arrival,
    Arrived,
    Drafted,
    Held,
    KvArrived,
    Outcome,
    Recorder,
    Released,
    Reserved,
    Step,
    StepRecord,
    StepsMeasured,
)
from maitred.decisions.replay import LoggedOutcomes, first_difference, fresh_scheduler, replay
from maitred.kv.prefix_cache import TokenHasher
from maitred.policy.policies import POLICIES
from maitred.scheduler.engine_core import EngineCore, StepListener
from maitred.scheduler.reservations import GivenUp
from maitred.scheduler.scheduler import Scheduler
from maitred.scheduler.speculation import Speculation
from tests.fakes import MODEL, FakeExecutor, make_request, make_samples, make_scheduler, make_spec, token_at
from tests.scheduler.test_scheduler_properties import postponing_some

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 24, 12
Run = tuple[list[bytes], Scheduler]
FIRST_TOKEN = 987_650_000  # token ids that no other number in a log can look like


def loud_token(request_id: str, position: int) -> int:
    return FIRST_TOKEN + token_at(request_id, position)


def some_forced(request_id: str, position: int) -> int:
    return token_at(request_id, position) % 5


def right_or_wrong(request_id: str, position: int) -> int:
    return loud_token(request_id, position) if position % 3 else FIRST_TOKEN


def some_drafts(request: RequestState, num_rows: int) -> int:
    return (request.num_tokens // 3 + num_rows) % 4


def step_time(plan: SchedulerOutput) -> float:
    """A cost model, in seconds."""
    return 0.01 + 0.001 * plan.num_tokens


class TimedExecutor(FakeExecutor):
    """Executing a plan takes the time that the cost model says."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(loud_token, right_or_wrong)
        self._clock = clock

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self._clock.advance(step_time(plan))
        return super().execute(plan)


def random_workload(chooser: Random, background: bool = False) -> list[RequestState]:
    """Arrivals over a second or two; many prompts begin alike, some are sampled twice."""
    requests: list[RequestState] = []
    arrived_at = 0.0
    for number in range(30):
        arrived_at += chooser.random() * 0.08
        name = f"r{number}"
        common = [loud_token("common", i) for i in range(chooser.randint(0, 20))]
        max_tokens = chooser.randint(1, 20)
        fields = {
            "prompt": [*common, *(loud_token(name, i) for i in range(chooser.randint(1, 20)))],
            "max_tokens": max_tokens,
            "arrived_at": arrived_at,
            "block_size": BLOCK_SIZE,
            "priority": chooser.randint(0, 2),
            "tenant": f"t{number % 3}",
            "weight": 1.0 + number % 2,
            "background": background and number % 2 == 0,
            "ttft_slo_s": (None, 0.05, 1.0)[number % 3],
            "start_by": arrived_at + 0.1 if chooser.random() < 0.1 else None,
            "finish_by": arrived_at + 0.3 if chooser.random() < 0.1 else None,
            "sampling": SamplingParams(
                max_tokens=max_tokens, prompt_logprobs=0 if chooser.random() < 0.1 else None, seed=number
            ),
        }
        samples = chooser.choice([1, 1, 1, 3])
        requests += make_samples(name, samples, **fields) if samples > 1 else [make_request(name, **fields)]
    return requests


def record_run(
    seed: int,
    meddle: bool = True,
    policies: Sequence[str] = ("priority", "fcfs"),
    forced_after: Callable[[str, int], int] | None = None,
    num_speculative_tokens: int = 0,
    kv_from_elsewhere: bool = False,
    num_state_slots: int = 0,
    background: bool = False,
    **settings: object,
) -> Run:
    """A live loop under random load; `meddle` aborts, finishes, fails and swaps the policy on the way."""
    most = num_speculative_tokens
    chooser, clock = Random(seed), ManualClock()
    scheduler = make_scheduler(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        policy=policies[0],
        quantum_tokens=5,
        ageing_tokens_per_s=50.0,
        num_host_blocks=NUM_HOST_BLOCKS,
        speculation=Speculation(most) if most else None,
        num_state_slots=num_state_slots,
        **settings,
    )
    header = Header(
        scheduler.config,
        NUM_BLOCKS,
        BLOCK_SIZE,
        enable_prefix_caching=True,
        num_host_blocks=NUM_HOST_BLOCKS,
        num_speculative_tokens=most,
        num_state_slots=num_state_slots,
    )
    executor = TimedExecutor(clock)
    executor.forced_after = forced_after or executor.forced_after
    executor.postponed = postponing_some() if forced_after else executor.postponed
    records: list[StepRecord] = []
    elsewhere = Elsewhere(chooser)
    core = EngineCore(scheduler, executor, clock, Recorder(records.append), elsewhere)
    arrivals = random_workload(chooser, background)
    while arrivals or core.has_work:
        if not core.has_work:
            clock.advance(max(0.0, arrivals[0].arrived_at - clock.now()))
        while arrivals and arrivals[0].arrived_at <= clock.now():
            core.add(arrivals.pop(0).spec)
        if meddle:
            meddle_with(core, executor, chooser, policies)
        if kv_from_elsewhere:
            elsewhere.act()
        if (most or background) and chooser.random() < 0.1:
            core.set_step_costs(CostModel(weights_s=0.01, decode_token_s=chooser.choice([0.0001, 0.002])))
        core.step()
    encoder = LogEncoder(header)  # after the run: encoding may lag behind
    return [encoder.start(), *map(encoder.encode, records)], scheduler


class Elsewhere(StepListener):
    """Sends KV, all of it, a part or none, and holds some for others; at random."""

    def __init__(self, chooser: Random) -> None:
        self._chooser = chooser
        self._coming: dict[str, tuple[int, int]] = {}

    def begin(self, core: EngineCore) -> None:
        self._core = core

    def act(self) -> None:
        core, chooser = self._core, self._chooser
        for request in chooser.sample(core.scheduler.waiting, min(2, len(core.scheduler.waiting))):
            reserved = core.reserve(request.request_id, request.num_prompt_tokens)
            if reserved is not None:
                self._coming[request.request_id] = reserved.start, reserved.end
            core.hold(f"lease {chooser.randint(0, 2)}", request.block_hashes)
        if self._coming and (not core.can_step or chooser.random() < 0.3):
            request_id = chooser.choice(sorted(self._coming))
            start, end = self._coming.pop(request_id)
            assert core.kv_arrived(request_id, chooser.choice([start, end, start + (end - start) // 8 * 4]))
        if not core.has_work or chooser.random() < 0.1:
            core.release(f"lease {chooser.randint(0, 2)}")

    def given_up(self, given_up: GivenUp) -> None:
        for request_id in given_up.request_ids:
            del self._coming[request_id]


def meddle_with(core: EngineCore, executor: FakeExecutor, chooser: Random, policies: Sequence[str]) -> None:
    chance = chooser.random()
    living = [*core.scheduler.running, *core.scheduler.waiting]
    if chance < 0.04 and living:
        core.abort(chooser.choice(living).request_id)
    elif chance < 0.08 and living:
        core.finish(chooser.choice(living).request_id, FinishReason.STOP, stop_reason="secret stop string")
    elif chance < 0.10 and living:
        executor.errors[chooser.choice(living).request_id] = "logits are NaN"
    elif chance < 0.11 and core.scheduler.waiting:
        core.finish(core.scheduler.waiting[-1].request_id, FinishReason.SHED)
    elif chance < 0.14:
        bandwidth = chooser.choice([1.0, 1e6])
        core.set_swap_costs(SwapCosts(16, bandwidth, bandwidth, 0.01))
    elif chance < 0.17:
        seqs = chooser.randint(1, 5)
        core.configure(replace(core.scheduler.config, policy=chooser.choice(sorted(policies)), max_num_seqs=seqs))


@pytest.mark.parametrize("policy", POLICIES)
def test_reservations_and_leases_are_decided_again_as_they_were(policy: str):
    kinds: set[type] = set()
    for seed in range(2):
        frames, _ = record_run(seed, True, (policy, *POLICIES), kv_from_elsewhere=True)
        assert first_difference(frames) is None
        kinds |= {type(event) for step in read_log(frames)[1] for event in step.events}
    assert {Reserved, KvArrived, Held, Released} <= kinds


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("meddle", [False, True])
def test_every_policy_decides_again_as_it_did(policy: str, meddle: bool):
    """Alone, and swapped for any other and back while requests wait and run."""
    for seed in range(2):
        frames, scheduler = record_run(seed, meddle, [policy, *POLICIES] if meddle else [policy])
        assert first_difference(frames) is None
        assert len(list(replay(frames))) == len(frames) - 1
        assert scheduler.stats.num_blocks_used == 0


@pytest.mark.parametrize("seed", range(4))
def test_forced_tokens_are_caught_up_with_again_as_they_were(seed: int):
    frames, _ = record_run(seed, policies=["vtc", *POLICIES], num_drafts=some_drafts, forced_after=some_forced)
    outcomes = [outcome for step in replay(frames) if step.equal for outcome in step.step.outcomes]
    assert first_difference(frames) is None
    assert sum(outcome.num_forced for outcome in outcomes) > 50
    assert any(0 < outcome.num_forced < outcome.num_tokens - 1 for outcome in outcomes)  # with accepted drafts


@pytest.mark.parametrize("seed", range(4))
def test_hits_that_end_where_a_state_was_kept_end_there_again(seed: int):
    frames, scheduler = record_run(seed, num_state_slots=6, num_drafts=some_drafts)
    assert first_difference(frames) is None
    assert scheduler.stats.num_state_evictions > 5
    header = msgspec.msgpack.decode(frames[0], type=Header)
    assert first_difference([msgspec.msgpack.encode(structs.replace(header, num_state_slots=0)), *frames[1:]])


@pytest.mark.parametrize("seed", range(4))
def test_how_many_tokens_to_draft_is_decided_again_by_what_was_told_and_what_came_of_them(seed: int):
    frames, _ = record_run(seed, policies=["vtc", *POLICIES], num_speculative_tokens=4)
    steps = [step.step for step in replay(frames)]
    assert first_difference(frames) is None
    assert len({row.num_drafts for step in steps for row in step.plan.rows}) > 2, "lengths differ"
    assert reencoded(frames[0], steps) == frames[1:]
    told_less = [*frames[:1], *reencoded(frames[0], [untold(step) for step in steps])]
    assert "num_tokens was" in str(first_difference(told_less))


@pytest.mark.parametrize("seed", range(4))
def test_background_work_joins_and_gives_way_again_by_what_steps_were_told_to_cost(seed: int):
    most = 4 * (seed % 2)
    frames, scheduler = record_run(seed, policies=["vtc", *POLICIES], num_speculative_tokens=most, background=True)
    steps = [step.step for step in replay(frames)]
    assert first_difference(frames) is None
    assert 0 < scheduler.stats.num_background_tokens < scheduler.stats.num_scheduled_tokens
    assert reencoded(frames[0], steps) == frames[1:]
    told_less = [*frames[:1], *reencoded(frames[0], [untold(step) for step in steps])]
    assert first_difference(told_less) is not None


def untold(step: Step) -> Step:
    """Without what steps cost."""
    return structs.replace(step, events=tuple(e for e in step.events if not isinstance(e, StepsMeasured)))


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_planned_again_as_they_were_and_settle_as_they_did(seed: int):
    frames, scheduler = record_run(seed, policies=["vtc", *POLICIES], num_drafts=some_drafts)
    replayed = list(replay(frames))
    assert [step.difference for step in replayed] == [None] * (len(frames) - 1)
    assert scheduler.stats.num_blocks_used == 0
    drafted = [row.num_drafts for step in replayed for row in step.step.plan.rows if row.num_drafts]
    accepted = [o.num_tokens - 1 for step in replayed for o in step.step.outcomes if o.num_tokens > 1]
    assert 0 < sum(accepted) < sum(drafted)
    assert reencoded(frames[0], [step.step for step in replayed]) == frames[1:]


def test_a_policys_arguments_are_in_the_log_and_decide_again():
    for policy, args in (("srpt", {"kv_block_weight": 40.0}), ("mlfq", {"quantum_tokens": 2, "ageing_s": 0.5})):
        frames, _ = record_run(3, False, [policy], policy_args=args)
        assert first_difference(frames) is None
        header, _ = read_log(frames)
        assert header.config.policy_args == args
        plain, _ = record_run(3, False, [policy])
        assert frames[1:] != plain[1:]  # so it was they that decided


def test_the_recorded_load_reaches_every_corner():
    stats = [record_run(seed)[1].stats for seed in range(12)]
    assert sum(s.num_preemptions for s in stats) > 20
    assert sum(s.num_prefix_hit_tokens for s in stats) > 100
    assert all(sum(s.num_finished[reason] for s in stats) > 0 for reason in FinishReason)
    steps = [step for seed in range(12) for step in read_log(record_run(seed)[0])[1]]
    assert any(step.plan.block_copies for step in steps)
    assert any(step.plan.swap_outs for step in steps)
    assert any(step.plan.swap_ins for step in steps)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_another_engine_began_are_replayed_with_the_output_they_brought(seed: int):
    """As a restarted engine gets them: some tokens known, nothing computed, hashes of all full blocks."""
    chooser, clock = Random(seed), ManualClock()
    scheduler = make_scheduler(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=24)
    records: list[StepRecord] = []
    core = EngineCore(scheduler, TimedExecutor(clock), clock, Recorder(records.append))
    for request in random_workload(chooser)[:12]:
        spec = structs.replace(request.spec, terms=NO_TERMS)
        known = list(spec.prompt_token_ids)
        if spec.max_tokens > 1 and spec.sample_index != 1:
            output = [loud_token(spec.request_id, i) for i in range(1, spec.max_tokens)]
            spec = structs.replace(spec, resumed=ResumePoint(output_token_ids=output))
            known = [*spec.prompt_token_ids, *output]
        added = core.add(spec)
        assert added.block_hashes == TokenHasher(BLOCK_SIZE, MODEL).hash_prompt(known)
    while core.has_work:
        core.step()
    encoder = LogEncoder(Header(scheduler.config, NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True))
    frames = [encoder.start(), *map(encoder.encode, records)]
    assert first_difference(frames) is None
    assert any(new.num_output_tokens for step in read_log(frames)[1] for new in step.plan.new_requests)


def test_blocks_for_a_prompt_that_is_only_brought_are_replayed_to_the_last_token():
    """Of an ordinary request the last token is computed, so a block less is reserved."""
    clock, records = ManualClock(), list[StepRecord]()
    scheduler = make_scheduler(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    core = EngineCore(scheduler, TimedExecutor(clock), clock, Recorder(records.append))
    core.add(structs.replace(make_spec("brought", prompt=3 * BLOCK_SIZE), kv_only=True))
    assert core.reserve("brought", 100) is not None
    core.kv_arrived("brought", 3 * BLOCK_SIZE)
    core.abort("brought")
    core.add(make_spec("other", prompt=5))
    while core.has_work:
        core.step()
    encoder = LogEncoder(Header(scheduler.config, NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True))
    assert first_difference([encoder.start(), *map(encoder.encode, records)]) is None


@pytest.mark.parametrize("seed", range(6))
def test_a_simulator_makes_the_plans_of_the_live_loop(seed: int):
    """Step 6 of the way of a request: `execute` is an event at now + step_time(plan), and nothing else differs."""
    frames, _ = record_run(seed, meddle=False)
    header, logged_steps = read_log(frames)
    steps = list(logged_steps)
    arrivals = [RequestState(event.spec) for step in steps for event in step.events if isinstance(event, Arrived)]
    outcomes = LoggedOutcomes()
    scheduler = fresh_scheduler(header, outcomes)
    now, plans = 0.0, []
    while arrivals or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[0].arrived_at)
        while arrivals and arrivals[0].arrived_at <= now:
            scheduler.add(arrivals.pop(0), now)
        scheduler.expire(now)
        plan = scheduler.schedule(now)
        plans.append(plan)
        now += step_time(plan)
        scheduler.update(plan, outcomes.set_step(steps[plan.step].outcomes), now)
    assert plans == [step.plan for step in steps]
    assert now == steps[-1].updated_at


def test_a_recorded_reason_comes_with_the_last_of_several_tokens():
    outcomes, request = LoggedOutcomes(), make_request("a")
    outcomes.set_step([Outcome("a", 3, FinishReason.STOP)])
    assert [outcomes.stop_rule(request) for _ in range(3)] == [None, None, FinishReason.STOP]


def test_no_token_and_no_text_is_in_the_log():
    frames, _ = record_run(3)
    log = b"".join(frames)
    assert not re.search(rb"9876[5-9]\d{4}|98770\d{4}", log)
    assert b"secret" not in log


def test_a_step_of_decoding_takes_a_few_bytes_on_the_disk():
    scheduler = make_scheduler(num_blocks=512, block_size=16, max_num_seqs=64, max_num_batched_tokens=512)
    records: list[StepRecord] = []
    core = EngineCore(scheduler, FakeExecutor(), ManualClock(), Recorder(records.append))
    for number in range(64):
        core.add(make_spec(f"a-long-request-id-{number:040}", prompt=8, max_tokens=40, block_size=16))
    while core.has_work:
        core.step()
    encoder = LogEncoder(Header(scheduler.config, 512, 16, enable_prefix_caching=True))
    frames = [encoder.encode(record) for record in records]
    num_bytes = len(zlib.compress(b"".join(frames[1:-1]), 3))
    assert num_bytes < 64 * 3 * len(frames[1:-1])


def changed(seed: int, number: int, **change: object) -> list[bytes]:
    """The log of a run in which step `number` was another: its plan or outcomes are as given."""
    frames, _ = record_run(seed)
    steps = list(read_log(frames)[1])
    steps[number] = structs.replace(steps[number], **change)
    return [frames[0], *reencoded(frames[0], steps)]


def reencoded(header: bytes, steps: list[Step]) -> list[bytes]:
    """Frames of decoded steps: they can be changed, and they are what they were."""
    encoder = LogEncoder(msgspec.msgpack.decode(header, type=Header))
    requests: dict[str, RequestState] = {}
    return [encoder.encode(record_of(step, requests)) for step in steps]


def record_of(step: Step, requests: dict[str, RequestState]) -> StepRecord:
    """As the engine handed it over."""
    events = []
    for event in step.events:
        if isinstance(event, Arrived):
            requests[event.spec.request_id] = RequestState(event.spec)
            events.append(
                Arrival(event.now, requests[event.spec.request_id], len(requests[event.spec.request_id].block_hashes))
            )
        else:
            events.append(event)
    progress, drafted = [], []
    for outcome in step.outcomes:
        if outcome.num_drafts:
            drafted.append(Drafted(outcome.request_id, outcome.num_drafts, outcome.num_accepted))
        requests[outcome.request_id].block_hashes += outcome.new_hashes
        progress.append(
            RequestProgress(outcome.request_id, (0,) * outcome.num_tokens, finish_reason=outcome.finish_reason)
        )
    return StepRecord(step.scheduled_at, step.updated_at, step.plan, tuple(progress), tuple(events), tuple(drafted))


def test_a_changed_plan_or_outcome_is_found_and_named():
    frames, _ = record_run(0)
    step = list(read_log(frames)[1])[5]
    row = step.plan.rows[0]._replace(start=99)
    plan = replace(step.plan, rows=(row, *step.plan.rows[1:]))
    assert (
        first_difference(changed(0, 5, plan=plan)) == f"step 5: plan.rows[0].start was 99, is {step.plan.rows[0].start}"
    )

    frames, _ = record_run(0)
    step = list(read_log(frames)[1])[5]
    plan = replace(step.plan, rows=step.plan.rows[:-1])
    assert "plan.rows was (" in (first_difference(changed(0, 5, plan=plan)) or "")

    frames, _ = record_run(0)
    steps = list(read_log(frames)[1])
    number = next(
        i for i in range(10, len(steps)) if any(o.finish_reason is FinishReason.LENGTH for o in steps[i].outcomes)
    )
    outcomes = tuple(structs.replace(o, finish_reason=None) for o in steps[number].outcomes)
    difference = first_difference(changed(0, number, outcomes=outcomes))
    assert difference is not None
    assert difference.startswith(f"step {number + 1}: plan.")


def test_what_is_damaged_no_log_or_of_another_version_is_refused():
    frames, _ = record_run(1)
    with pytest.raises(ConfigError, match="record 4 is damaged"):
        list(replay([*frames[:3], b"\x90", *frames[4:]]))

    with pytest.raises(ConfigError, match="is this a decision log"):
        read_log([b"hello\n"])
    with pytest.raises(ConfigError, match="is this a decision log"):
        read_log([])
    header = Header(make_scheduler().config, 4, 4, enable_prefix_caching=True, version=10)
    with pytest.raises(ConfigError, match="version 10, this maitred reads version 12; read it with"):
        read_log([msgspec.msgpack.encode(header)])


def test_parts_of_other_runs_and_parts_out_of_order_are_refused():
    frames, _ = record_run(1)
    header = msgspec.msgpack.decode(frames[0], type=Header)

    def part(number: int, run: str = "") -> bytes:
        return msgspec.msgpack.encode(structs.replace(header, part=number, run=run))

    assert first_difference([*frames[:9], part(1), *frames[9:]]) is None
    with pytest.raises(ConfigError, match="part 2 follows part 0"):
        first_difference([*frames[:9], part(2), *frames[9:]])
    with pytest.raises(ConfigError, match="one run at a time"):
        first_difference([*frames[:9], part(1, "other"), *frames[9:]])
    with pytest.raises(ConfigError, match="this is part 3 of its run"):
        first_difference([part(3), *frames[1:]])
