"""The gate: what a caller may ask, whose terms hold, what a lease takes, and that every way out gives it all back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config import AdmissionConfig
from maitred.core.errors import InvalidRequest, MaitredError, Overloaded, PermissionDenied, RateLimited
from maitred.core.request import FinishReason, RequestSpec, SamplingParams
from maitred.core.step import RequestProgress
from maitred.gate.admission import AdmissionController
from maitred.gate.gate import Ask, Gate, TimeLimits
from maitred.tenancy.caller import Caller, anybody
from maitred.tenancy.quota import TenantQuota
from maitred.tenancy.tenant import Limits, Tenant
from tests.fakes import make_samples, make_spec


def caller(limits: Limits | None = None, **terms: Any) -> Caller:
    tenant = Tenant(name="acme", limits=limits or Limits(), **terms)
    return Caller(tenant, TenantQuota("acme", tenant.limits), key_id="k1")


def make_gate(max_concurrent_requests: int | None = None, max_num_seqs: int = 4, **config: Any) -> Gate:
    admission = AdmissionController(AdmissionConfig(**config), max_num_seqs=max_num_seqs)
    return Gate(admission, max_concurrent_requests=max_concurrent_requests)


def held(gate: Gate) -> tuple[int, int, int]:
    assert gate.admission is not None
    return gate.num_in_flight, gate.admission.num_inside, len(gate.leases)


# ---- terms


def admitted(who: Caller, spec: RequestSpec, ask: Ask | None = None, **config: Any) -> RequestSpec:
    gate = make_gate(**config)
    (only,) = gate.admit(gate.enter(who, ask or Ask(), 5.0), [spec], 5.0).specs
    return only


def test_the_strictest_terms_of_request_tenant_and_server_hold():
    own = {"weight": 4.0, "ttft_slo_s": 2.0, "queue_timeout_s": 3.0, "timeout_s": 9.0}
    terms = admitted(caller(**own, default_priority=2), make_spec("r", arrived_at=5.0)).terms
    assert (terms.tenant, terms.weight, terms.key_id, terms.priority) == ("acme", 4.0, "k1", 2)
    assert (terms.ttft_slo_s, terms.start_by, terms.finish_by) == (2.0, 8.0, 14.0)
    who = caller(ttft_slo_s=2.0, timeout_s=9.0)
    own = make_spec("r", arrived_at=5.0, ttft_slo_s=0.5, start_by=25.0, finish_by=25.0)
    terms = admitted(who, own, ttft_objective_s=1.0, queue_timeout_s=4.0, request_timeout_s=60.0).terms
    assert (terms.ttft_slo_s, terms.start_by, terms.finish_by) == (0.5, 9.0, 14.0)
    terms = admitted(anybody(), make_spec("r", tenant="named", weight=3.0), ttft_objective_s=1.0).terms
    assert (terms.tenant, terms.weight, terms.key_id, terms.ttft_slo_s) == ("named", 3.0, "", 1.0)


def test_a_priority_is_granted_within_the_callers_range_and_refused_before_it_costs_anything():
    who, gate = caller(Limits(requests_per_minute=1), priorities=(1, 5)), make_gate()
    with pytest.raises(PermissionDenied, match=r"priority is 0; this key may ask for 1 \(most urgent\) to 5"):
        gate.enter(who, Ask(priority=0), 0.0)
    assert gate.enter(who, Ask(priority=4), 0.0).priority == 4


def test_who_names_no_max_tokens_gets_the_tenants_default_and_what_the_quota_has():
    silent = SamplingParams(max_tokens=None)
    who = caller(default_max_tokens=40)
    assert admitted(who, make_spec("r", max_tokens=900, sampling=silent)).max_tokens == 40
    who = caller(Limits(tokens_per_minute=100), default_max_tokens=4000)
    assert admitted(who, make_spec("r", prompt=8, max_tokens=900, sampling=silent)).max_tokens == 92


def test_a_request_of_which_only_the_length_is_known_is_admitted_as_any_other():
    """As a router sees it: bytes that were counted, and no token."""
    counted = RequestSpec(request_id="r", arrived_at=0.0, num_prompt_tokens=60, max_tokens=30)
    who, gate = caller(Limits(tokens_per_minute=100)), make_gate(max_queued_tokens=100)
    gate.admit(gate.enter(who, Ask(), 0.0), [counted], 0.0)
    with pytest.raises(RateLimited, match="tokens, prompt and max_tokens"):
        gate.admit(gate.enter(who, Ask(), 0.0), [make_spec("s", prompt=8, max_tokens=8)], 0.0)
    with pytest.raises(Overloaded, match="the prompts that wait have 60 tokens"):
        gate.admit(gate.enter(anybody(), Ask(priority=1), 0.0), [make_spec("t", prompt=50)], 0.0)


def test_background_work_takes_no_place_that_another_request_could_have_and_only_the_limits_that_it_asks_for():
    gate = make_gate(max_concurrent_requests=1, max_queued_requests=1, queue_timeout_s=3.0, request_timeout_s=9.0)
    lines = replace(caller(Limits(concurrency=2), timeout_s=5.0), background=True)
    leases = [gate.enter(lines, Ask(), 0.0) for _ in range(2)]
    with pytest.raises(RateLimited, match="its concurrency is 2"):
        gate.enter(lines, Ask(), 0.0)  # the tenant's own limits hold for lines too
    admitted = [gate.admit(lease, [make_spec(f"l{i}", finish_by=86400.0)], 0.0) for i, lease in enumerate(leases)]
    assert held(gate) == (0, 0, 2)
    (spec,) = admitted[0].specs
    assert spec.terms.background
    assert (spec.terms.start_by, spec.terms.finish_by, spec.terms.ttft_slo_s) == (None, 86400.0, None)
    gate.admit(gate.enter(anybody(), Ask(), 0.0), [make_spec("chat")], 0.0)
    assert held(gate) == (1, 1, 3)
    for lease in leases:
        lease.end(12)
    assert (lines.quota.num_in_flight, held(gate)) == (0, (1, 1, 1))


# ---- refusals, in the order in which they are looked for


def test_the_tenants_limits_go_before_the_servers_which_keep_nothing_of_the_tenant():
    who, gate = caller(Limits(concurrency=1)), make_gate(max_concurrent_requests=1)
    gate.enter(who, Ask(), 0.0)
    with pytest.raises(RateLimited, match="its concurrency is 1"):
        gate.enter(who, Ask(), 0.0)
    with pytest.raises(Overloaded, match="1 requests are in flight, the limit is 1"):
        gate.enter(anybody(), Ask(), 0.0)
    with pytest.raises(InvalidRequest, match="prompts times n is 2; this server holds at most 1 at once"):
        gate.enter(anybody(), Ask(num_samples=2), 0.0)
    who, gate = caller(Limits(concurrency=4, max_queue=4)), make_gate(max_concurrent_requests=2)
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            gate.enter(who, Ask(num_samples=3), 0.0)
    assert (who.quota.num_in_flight, who.quota.num_waiting, gate.num_in_flight) == (0, 0, 0)


def test_a_tenants_objective_counts_before_the_prompt_and_a_probe_queues_like_everybody():
    gate = make_gate(max_concurrent_requests=1, max_queued_requests=1)
    gate.admit(gate.enter(anybody(), Ask(), 0.0), [make_spec("a")], 0.0)
    with pytest.raises(Overloaded, match="1 requests wait, the limit is 1"):
        gate.enter(anybody(), Ask(num_samples=0), 0.0)
    gate.progressed([RequestProgress("a", (7,))], 0, 0.0)
    gate.enter(anybody(), Ask(num_samples=0), 0.0)
    assert gate.num_in_flight == 1
    gate = make_gate(max_num_seqs=8)
    for name in ("a", "b"):  # one wait is allowed to eight slots, as long as nobody knows how fast work leaves
        gate.admit(gate.enter(anybody(), Ask(), 0.0), [make_spec(name)], 0.0)
    gate.progressed([], 1, 0.1)
    gate.enter(caller(), Ask(), 0.1)
    with pytest.raises(Overloaded, match="too many for a first token within the objective"):
        gate.enter(caller(ttft_slo_s=1.0), Ask(), 0.1)
    with pytest.raises(Overloaded, match="too many for a first token within the objective"):
        gate.enter(anybody(), Ask(limits=TimeLimits(ttft_slo_s=1.0)), 0.1)


def test_all_samples_are_let_in_or_none_and_then_nobody_is_shed_for_them():
    gate = make_gate(max_queued_requests=2)
    low = gate.enter(anybody(), Ask(priority=5), 0.0)
    gate.admit(low, [make_spec("low", prompt=4)], 0.0)
    prompts = [make_spec(f"p{i}", prompt=4) for i in range(3)]
    with pytest.raises(Overloaded, match="2 requests wait, the limit is 2"):
        gate.admit(gate.enter(anybody(), Ask(num_samples=3), 0.0), prompts, 0.0)
    assert held(gate) == (1, 1, 1)
    assert gate.admission is not None
    assert gate.admission.num_waiting == 1
    assert gate.admit(gate.enter(anybody(), Ask(num_samples=2), 0.0), prompts[:2], 0.0).shed == ("low",)


# ---- a lease


def test_a_lease_gives_back_once_and_everything_but_what_was_used():
    who, gate = caller(Limits(tokens_per_minute=1000)), make_gate()
    lease = gate.enter(who, Ask(num_samples=2), 0.0)
    samples = [sample.spec for sample in make_samples("p", 2, prompt=10, max_tokens=20)]
    gate.admit(lease, samples, 0.0)
    assert (who.quota.reserved_tokens, held(gate)) == (50, (2, 2, 2))
    lease.end(13)
    lease.end(13)
    assert (who.quota.reserved_tokens, who.quota.spent_tokens, who.quota.num_in_flight) == (0, 13, 0)
    assert held(gate) == (0, 0, 0)


def test_quota_and_queue_wait_for_the_first_token_and_a_gate_without_admission_keeps_its_bound():
    who, gate = caller(Limits(max_queue=4)), make_gate()
    lease = gate.enter(who, Ask(num_samples=2), 0.0)
    gate.admit(lease, [make_spec("a"), make_spec("b")], 0.0)
    for _ in range(2):
        gate.progressed([RequestProgress("a", (7,)), RequestProgress("stranger", (7,))], 0, 0.1)
    assert gate.admission is not None
    assert (who.quota.num_waiting, gate.admission.num_waiting) == (1, 1)
    gate.progressed([RequestProgress("a", (), finish_reason=FinishReason.STOP)], 0, 0.2)
    assert (held(gate), who.quota.num_in_flight) == ((2, 1, 1), 2)
    who, gate = caller(Limits(max_queue=1)), Gate(max_concurrent_requests=2)
    gate.admit(gate.enter(who, Ask(), 0.0), [make_spec("a")], 0.0)
    with pytest.raises(RateLimited, match="its max_queue is 1"):
        gate.enter(who, Ask(), 0.0)
    gate.progressed([RequestProgress("a", (7,))], 0, 0.0)
    gate.enter(who, Ask(), 0.0)
    with pytest.raises(Overloaded):
        gate.enter(anybody(), Ask(), 0.0)
    assert gate.retry_after_s(0.0) == 1.0


@given(st.data())
def test_whatever_happens_nothing_is_held_once_all_leases_have_ended(data: st.DataObject):
    gate = make_gate(max_concurrent_requests=6, max_queued_requests=4, max_queued_tokens=80)
    who = caller(Limits(concurrency=5, max_queue=4, tokens_per_minute=400), priorities=(0, 9))
    leases = []
    for number in range(data.draw(st.integers(1, 25))):
        now, n = 0.1 * number, data.draw(st.integers(1, 3))
        ask = Ask(num_samples=n, priority=data.draw(st.integers(0, 3)))
        try:
            lease = gate.enter(data.draw(st.sampled_from([who, anybody()])), ask, now)
            leases.append(lease)
            if data.draw(st.booleans()):
                specs = [make_spec(f"r{number}-{i}", prompt=data.draw(st.integers(1, 30))) for i in range(n)]
                gate.admit(lease, specs, now)
        except MaitredError:
            pass
        live = data.draw(st.lists(st.sampled_from(sorted(gate.leases)), unique=True)) if gate.leases else []
        ends = [data.draw(st.sampled_from([None, FinishReason.STOP, FinishReason.SHED])) for _ in live]
        told = [RequestProgress(name, (7,), finish_reason=end) for name, end in zip(live, ends, strict=True)]
        gate.progressed(told, 1, now)
        if leases and data.draw(st.booleans()):
            leases.pop(data.draw(st.integers(0, len(leases) - 1))).end(3)
        who.quota.check_invariants()
        assert gate.num_in_flight == sum(lease.num_samples for lease in leases if not lease.ended)
    for lease in leases:
        lease.end(3)
    assert held(gate) == (0, 0, 0)
    assert (who.quota.num_in_flight, who.quota.num_waiting, who.quota.reserved_tokens) == (0, 0, 0)
