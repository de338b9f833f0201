"""Wires one engine: checkpoint, memory plan, executor, scheduler, core; the only place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from maitred.config import EngineConfig
from maitred.core.clock import Clock, WallClock
from maitred.core.cost_model import CostModel
from maitred.core.request import RequestSpec, SamplingParams
from maitred.core.step import Executor
from maitred.decisions.codec import Header
from maitred.decisions.files import DecisionLogFile
from maitred.decisions.log import Recorder
from maitred.engine.adapters import AdapterCache, adapter_cache, introduced
from maitred.engine.drafting import make_proposer
from maitred.engine.executors import BuiltExecutor, OnLost
from maitred.engine.installed import installed_policies
from maitred.engine.intake import ServedModel
from maitred.engine.loop import LoadedEngine, Prepare
from maitred.engine.memory import MemoryPlan, format_bytes
from maitred.engine.model_facts import ModelFacts
from maitred.engine.planning import EnginePlan, OnEvent, check_overrides, facts_of, plan_engine
from maitred.engine.step_meter import ExpertLoad, StepMeter, SwapMeter
from maitred.engine.timeline import Timeline
from maitred.engine.traffic import TrafficRing
from maitred.executor.grammar import Grammars
from maitred.kv.pages import kv_cache_manager
from maitred.kv.prefix_cache import TokenHasher
from maitred.model.checkpoint import Checkpoint, open_checkpoint
from maitred.model.pooling import pooled_layers
from maitred.model.spec import DecoderSpec
from maitred.policy.policies import POLICIES, policy_for
from maitred.policy.policy import PolicyFactory
from maitred.scheduler.engine_core import EngineCore, StepListener
from maitred.scheduler.scheduler import Scheduler
from maitred.scheduler.speculation import Speculation

if TYPE_CHECKING:
    from maitred.executor.pooling import Pooler
    from maitred.kv.keeping import KVTiers
    from maitred.kv.peers import KVPeers
    from maitred.kv.tiers import KVTier


FIRST_STEPS_S = 3.0  # of a start, at most: a slower machine learns from its requests


@dataclass(kw_only=True)
class EngineParts:
    """A wired engine; nothing steps it yet."""

    core: EngineCore
    executor: BuiltExecutor
    facts: ModelFacts
    spec: DecoderSpec
    memory_plan: MemoryPlan
    start_phases: Mapping[str, float]  # s, in order
    decision_log: DecisionLogFile | None = None
    prepare: Prepare | None = None  # compiles a grammar
    adapters: AdapterCache | None = None  # None where the executor has none
    kv_tiers: KVTiers | None = None  # None where nothing outlives a request
    kv_peers: KVPeers | None = None  # None where no other engine is beside it

    @property
    def deterministic(self) -> bool:
        """Whether tokens do not depend on what shares the batch."""
        return bool(getattr(self.executor, "deterministic", False))

    @cached_property
    def model(self) -> ServedModel:
        """The model as requests are made for it; its text is read when it is first asked for."""
        return ServedModel.of(self.facts)

    def close(self) -> None:
        """Give back memory and threads."""
        self.core.close()
        if self.decision_log is not None:
            self.decision_log.close()


def build_parts(
    config: EngineConfig,
    *,
    served_model_names: Sequence[str] = (),
    on_event: OnEvent | None = None,
    clock: Clock | None = None,
    policies: Mapping[str, PolicyFactory] = POLICIES,
    on_lost: OnLost | None = None,
    wake: Callable[[], None] = lambda: None,
) -> EngineParts:
    """Load and wire; raises CheckpointError, ConfigError or OutOfMemory before anything large is allocated.

    `on_lost` is told, in some thread, of a rank that ended by itself; steps raise from then on. `wake` is the core's.
    """
    tell = on_event or (lambda line: None)
    clock = clock or WallClock()
    timeline = Timeline(clock)
    check_overrides(config.model.generation_config)
    policy_for(config.scheduler, policies)  # before anything is loaded
    with ExitStack() as files:
        checkpoint = files.enter_context(open_checkpoint(config.model.model, config.model.revision))
        plan = plan_engine(config, checkpoint, tell, files)
        config = plan.config
        proposer = plan.drafts.name if plan.drafts is not None else ""
        facts = facts_of(
            config, checkpoint, plan.spec, plan.executor, plan.memory, served_model_names, proposer, plan.pooling
        )
        timeline.end("plan")
        _tell_use(facts, tell)
        with ExitStack() as undo:  # gives back what another process may want, when we cannot have the rest
            tiers = _tiers(config, checkpoint, plan, tell)
            for tier in tiers:
                undo.callback(tier.close)
            executor = _build_executor(plan, timeline, tell, told_now_and_then(tell, clock), on_lost)
            executor.pooler = _pooler(plan, executor, checkpoint)
            undo.pop_all()
    grammars = executor.grammars = Grammars(
        facts.tokenizer_folder, facts.vocab_size, facts.eos_token_ids, forces=config.model.forced_tokens
    )
    adapters = None
    if plan.spec.encoder is None:
        adapters = adapter_cache(getattr(executor, "adapters", None), plan.spec, config.lora)
    if adapters is not None and config.lora.lora:
        facts = replace(facts, adapters=tuple(introduced(adapters, config.lora.lora)))
        tell(f"lora    {len(facts.adapters)} adapters, of rank {max(one.rank for one in facts.adapters)} at most")
        timeline.end("adapters")
    header = _log_header(config, plan)
    log = _decision_log(config, header) if config.decision_log is not None else None
    make_scheduler = partial(_scheduler, config, plan, facts.revision, policies)
    meters, step_costs = _meters(config, plan, executor, make_scheduler, clock, tell)
    kv_peers, kv_tiers = _movers(config, executor, facts, plan.spec, tiers, clock)
    listeners = [
        Recorder(log.write) if log is not None else None,  # before those that hold what a step has computed
        TrafficRing(header, plan.memory.bytes_per_block / plan.memory.block_size, plan.spec.num_layers),
        *meters,
        ExpertLoad(executor) if plan.executor.name == "native" and plan.spec.is_routed else None,
        adapters,
        kv_peers.gives if kv_peers is not None else None,
        kv_peers,
        kv_tiers,
    ]
    core = EngineCore(make_scheduler(), executor, clock, *(each for each in listeners if each is not None), wake=wake)
    if step_costs is not None:
        core.set_step_costs(step_costs)
    timeline.end("scheduler")
    tell(f"ready   in {timeline.total_s:.2f} s")
    return EngineParts(
        core=core,
        executor=executor,
        facts=facts,
        spec=plan.spec,
        memory_plan=plan.memory,
        start_phases=timeline.phases,
        decision_log=log,
        prepare=grammars.prepare,
        adapters=adapters,
        kv_tiers=kv_tiers,
        kv_peers=kv_peers,
    )


def load_engine(
    config: EngineConfig,
    served_model_names: tuple[str, ...],
    tell: OnEvent,
    wake: Callable[[], None],
    on_lost: OnLost | None = None,
) -> LoadedEngine:
    """The engine that `config` describes, for a loop; installed policies are among those that it may name."""
    parts = build_parts(
        config,
        served_model_names=served_model_names,
        on_event=tell,
        policies=installed_policies(),
        on_lost=on_lost,
        wake=wake,
    )
    return LoadedEngine(
        core=parts.core,
        facts=parts.facts,
        memory_plan=parts.memory_plan,
        deterministic=parts.deterministic,
        close=parts.close,
        prepare=parts.prepare,
        adapters=parts.adapters,
        start_phases=parts.start_phases,
        kv_addresses=parts.kv_peers.gives.addresses if parts.kv_peers is not None else (),
        num_kv_layers=parts.kv_peers.num_layers if parts.kv_peers is not None else 1,
    )


def told_now_and_then(tell: OnEvent, clock: Clock, every_s: float = 2.0) -> Callable[[int, int], None]:
    """A callback that tells every `every_s` how far the packing of weights is: of a large model it takes minutes."""
    began_at = told_at = clock.now()

    def on_packed(num_bytes: int, total: int) -> None:
        nonlocal told_at
        now = clock.now()
        if now - told_at < every_s or num_bytes >= total:
            return
        told_at, rate = now, num_bytes / (now - began_at)
        tell(
            f"weights packing, {format_bytes(num_bytes)} of {format_bytes(total)} at {rate / 1e9:.2f} GB/s, "
            f"{(total - num_bytes) / rate:.0f} s left"
        )

    return on_packed


def _tell_use(facts: ModelFacts, tell: OnEvent) -> None:
    """Tell what the model is not served for."""
    if facts.pooling is not None and not facts.pooling.generates:
        tell("vectors texts become vectors or scores: /v1/embeddings, /v1/rerank, /v1/score; it generates nothing")
    elif facts.chat_template is None:
        tell("chat    the model has no chat template, so /v1/chat/completions is refused; --chat-template FILE")
    elif isinstance(facts.chat_template, dict) and "default" not in facts.chat_template:
        tell(f"chat    no chat template is `default`, only {', '.join(facts.chat_template)}; --chat-template FILE")


def _build_executor(
    plan: EnginePlan, timeline: Timeline, tell: OnEvent, on_packed: Callable[[int, int], None], on_lost: OnLost | None
) -> BuiltExecutor:
    """Loads the weights and allocates the cache; each phase ends on the timeline."""

    def on_phase(phase: str, story: str) -> None:
        timeline.end(phase)
        if story:
            tell(f"{phase:7} {story} in {timeline.phases[phase]:.2f} s")

    executor = plan.executor.build(
        num_blocks=plan.memory.num_pages,
        max_model_len=plan.memory.max_model_len,
        num_host_blocks=plan.num_host_blocks,
        num_state_slots=plan.memory.num_state_slots,
        on_phase=on_phase,
        on_packed=on_packed,
        on_lost=on_lost,
    )
    timeline.end("executor")
    if plan.drafts is not None:
        executor.proposer, story = make_proposer(
            plan.drafts,
            executor,
            num_blocks=plan.memory.num_blocks,
            max_model_len=plan.memory.max_model_len,
            on_packed=on_packed,
        )
        on_phase("drafts", story)
    return executor


def _pooler(plan: EnginePlan, executor: Any, checkpoint: Checkpoint) -> Pooler:
    """What makes vectors of an executor's states, with layers of the checkpoint behind pooling."""
    from maitred.executor.pooling import Pooler

    spec, encoder, layers = plan.spec, plan.spec.encoder, pooled_layers(checkpoint, plan.pooling)
    second_ids = spec.vocab_size if encoder is not None and encoder.num_types > 1 else 0
    is_normed = encoder is not None or plan.executor.name == "torch"
    norm = None if is_normed else executor.runner.weights["norm"].vector
    return Pooler(plan.pooling.kind, norm=norm, eps=spec.norm_eps, layers=layers, second_ids=second_ids)


def _scheduler(
    config: EngineConfig, plan: EnginePlan, revision: str, policies: Mapping[str, PolicyFactory]
) -> Scheduler:
    cache = kv_cache_manager(
        plan.memory.groups,
        num_pages=plan.memory.num_pages,
        num_blocks=plan.memory.num_blocks,
        block_size=config.cache.block_size,
        hasher=TokenHasher(config.cache.block_size, revision),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_host_blocks=plan.num_host_blocks,
        num_state_slots=plan.memory.num_state_slots,
    )
    drafts = plan.drafts is not None
    speculation = Speculation(config.speculative.num_speculative_tokens) if drafts else None
    return Scheduler(plan.scheduler, cache, policies=policies, speculation=speculation)


def _meters(
    config: EngineConfig,
    plan: EnginePlan,
    executor: BuiltExecutor,
    make_scheduler: Callable[[], Scheduler],
    clock: Clock,
    tell: OnEvent,
) -> tuple[list[StepListener], CostModel | None]:
    """Meters of what swaps and steps cost, and the costs where choices among workers rest on them: measured first.
    Without drafts, steps are measured from the first background request on.
    """
    meters: list[StepListener] = []
    bandwidth = executor.measure_swap()
    if bandwidth is not None:
        bytes_per_row, out, back = plan.executor.bytes_per_page, bandwidth.out_bytes_per_s, bandwidth.in_bytes_per_s
        what = "pages" if plan.memory.groups is not None else "blocks"
        tell(
            f"swap    {format_bytes(plan.num_host_blocks * bytes_per_row)} of host memory = "
            f"{plan.num_host_blocks:,} {what}; {out / 1e9:.1f} GB/s out, {back / 1e9:.1f} GB/s in"
        )
        meters.append(SwapMeter(bytes_per_block=bytes_per_row, out_bytes_per_s=out, in_bytes_per_s=back))
    needs_costs = plan.drafts is not None or config.share.exchanges_kv
    meter, costs = StepMeter(follows_steps=needs_costs), None
    if config.share.exchanges_kv:
        longest = min(plan.memory.max_model_len, plan.memory.num_blocks * config.cache.block_size // 8)
        costs = measure_first_steps(meter, make_scheduler(), executor, clock, longest)
    return [*meters, meter], costs


def _tiers(config: EngineConfig, checkpoint: Checkpoint, plan: EnginePlan, tell: OnEvent) -> list[KVTier]:
    if not config.tiers.are_wanted:
        return []
    from maitred.engine.kv import opened_tiers

    return opened_tiers(config, checkpoint, plan, tell)


def _movers(
    config: EngineConfig,
    executor: BuiltExecutor,
    facts: ModelFacts,
    spec: DecoderSpec,
    tiers: Sequence[KVTier],
    clock: Clock,
) -> tuple[KVPeers | None, KVTiers | None]:
    if not tiers and not config.share.exchanges_kv:
        return None, None
    from maitred.engine.kv import movers

    return movers(config, executor, facts, spec, tiers, clock)


def _log_header(config: EngineConfig, plan: EnginePlan) -> Header:
    return Header(
        config=plan.scheduler,
        num_blocks=plan.memory.num_blocks,
        block_size=plan.memory.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_host_blocks=plan.num_host_blocks,
        groups=plan.memory.groups,
        num_pages=plan.memory.num_pages if plan.memory.groups is not None else 0,
        num_state_slots=plan.memory.num_state_slots,
        num_speculative_tokens=config.speculative.num_speculative_tokens if plan.drafts is not None else 0,
    )


def _decision_log(config: EngineConfig, header: Header) -> DecisionLogFile:
    return DecisionLogFile(
        Path(config.decision_log or ""),
        header,
        max_bytes=config.decision_log_max_bytes,
        max_files=config.decision_log_max_files,
    )


def measure_first_steps(
    meter: StepMeter, scheduler: Scheduler, executor: Executor, clock: Clock, most_tokens: int
) -> CostModel | None:
    """Step costs after chunks of prompts and decoding of one and of four; None if they took too long to tell.

    `scheduler` is for these requests alone, each of `most_tokens` at most; the KV they leave belongs to no request.
    """
    core = EngineCore(scheduler, executor, clock, meter)
    budget, began = scheduler.config.token_budget, clock.now()
    for count, prompt, output in ((1, budget // 4, 3), (1, 2 * budget, 4), (4, budget // 4, 5)):
        for number in range(count):
            core.add(_first_request(f"first/{number}", max(1, min(prompt, most_tokens - output)), output, clock.now()))
        while core.has_work and clock.now() - began < FIRST_STEPS_S:
            core.step()
        for state in (*scheduler.running, *scheduler.waiting):
            core.abort(state.request_id)
        core.step()  # the executor forgets them
    return meter.costs


def _first_request(request_id: str, num_tokens: int, num_outputs: int, now: float) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        prompt_token_ids=[1] * num_tokens,
        sampling=SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True),
        arrived_at=now,
        num_prompt_tokens=num_tokens,
        max_tokens=num_outputs,
    )
