"""The lanes as one would write them without heaps: everything is sorted whenever something is decided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from maitred.core.request import RequestStatus
from maitred.core.tensor_request import Batch, BatchOutcome, BatchRules, LaneKey, TensorRequest
from maitred.policy.policy import Policy
from maitred.scheduler.lane import LanePace

Key = tuple[str, int]
Candidate = tuple[tuple[Any, ...], Key, LaneKey]  # place of its head, model, lane
WAITING, RUNNING, FINISHED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED


@dataclass(slots=True, eq=False)
class SlowModel:
    rules: BatchRules
    unloaded: bool = False
    turns: int = 0
    num_requests: int = 0
    busy: dict[int, BatchRules] = field(default_factory=dict)  # instance -> rules when its batch began


class SlowLanes:
    """Answers which batches go, from lists alone. Its policy is one of its own, told what the other's is told."""

    def __init__(self, policy: Policy, tensor_share: float) -> None:
        self.policy, self.tensor_share = policy, tensor_share
        self.llm_has_rows = False
        self.models: dict[Key, SlowModel] = {}
        self.waiting: list[TensorRequest] = []
        self.running: dict[int, tuple[Batch, list[TensorRequest], float, float | None]] = {}
        self.share_at = 0.0
        self.turns_now = 0
        self.num_batches = 0
        self.go_behind: dict[str, float] = {}
        self.paces: dict[LaneKey, LanePace] = {}

    def load(self, key: Key, rules: BatchRules) -> None:
        model = self.models.setdefault(key, SlowModel(rules))
        model.rules, model.unloaded = rules, False

    def unload(self, key: Key) -> None:
        self.models[key].unloaded = True
        self._drop(key)

    def _drop(self, key: Key) -> None:
        if self.models[key].unloaded and not self.models[key].num_requests:
            del self.models[key]
            self.paces = {lane: pace for lane, pace in self.paces.items() if lane[:2] != key}

    def add(self, request: TensorRequest, now: float) -> None:
        model = self.models[request.spec.lane[:2]]
        model.num_requests += 1
        request.level, request.queued_at = model.rules.level_of(request.spec), now
        queue = model.rules.queue_of(request.level)
        timeout_s = queue.timeout_of(request.spec)
        if timeout_s and queue.delays:
            self.go_behind[request.request_id] = now + timeout_s
        elif timeout_s:
            request.start_by = now + timeout_s if request.start_by is None else min(request.start_by, now + timeout_s)
        self.pace(request.spec.lane).came(request.num_rows, now)
        if not any(one.spec.lane[:2] == request.spec.lane[:2] for one in self.waiting):
            model.turns = max(model.turns, self.turns_now)
        self._enqueue(request)

    def pace(self, lane: LaneKey) -> LanePace:
        return self.paces.setdefault(lane, LanePace())

    def _enqueue(self, request: TensorRequest) -> None:
        if self.policy.groups is not None:
            self.policy.groups.on_queued(request)
        if not request.key:
            request.key = self.policy.order(request)
        self.waiting.append(request)

    def end(self, request: TensorRequest) -> None:
        """It finished, wherever it was."""
        if request in self.waiting:
            self.waiting.remove(request)
        request.status = FINISHED
        if self.policy.groups is not None:
            self.policy.groups.on_finished(request)
        key = request.spec.lane[:2]
        self.models[key].num_requests -= 1
        self._drop(key)

    def place(self, request: TensorRequest) -> tuple[Any, ...]:
        rule = self.policy.groups
        return request.key if rule is None else (rule.rank(rule.group_of(request)), rule.group_of(request), request.key)

    def in_lane(self, request: TensorRequest) -> tuple[Any, ...]:
        rule, key = self.policy.groups, (request.level, request.behind, *request.key)
        return key if rule is None else (rule.rank(rule.group_of(request)), rule.group_of(request), key)

    def lanes_of(self, key: Key) -> dict[LaneKey, list[TensorRequest]]:
        lanes: dict[LaneKey, list[TensorRequest]] = {}
        for request in sorted(self.waiting, key=self.in_lane):
            if request.spec.lane[:2] == key:
                lanes.setdefault(request.spec.lane, []).append(request)
        return lanes

    def next_batch(self, rules: BatchRules, lane: list[TensorRequest], now: float) -> tuple[int, float]:
        """(most rows, when it may go) by Triton's GetDynamicBatch."""
        if not rules.dynamic or rules.max_batch_size <= 1:
            return lane[0].num_rows, now
        total = sum(one.num_rows for one in lane)
        if any(one.num_losses for one in lane):
            return min(total, rules.max_batch_size), now
        sums, closed = [lane[0].num_rows], False
        for request in lane[1:]:
            if sums[-1] + request.num_rows > rules.max_batch_size:
                closed = True
                break
            sums.append(sums[-1] + request.num_rows)
        best = self._preferred(rules, sums, lane[len(sums)] if closed else None)
        if self.policy.groups is not None:  # as if they were single rows
            sums, closed = list(range(1, min(total, rules.max_batch_size) + 1)), total > rules.max_batch_size
            best = max((size for size in rules.sizes if size <= sums[-1]), default=0)
        enough, delay_s = rules.max_batch_size, rules.delay_s
        if rules.auto_delay:
            enough, delay_s = self.pace(lane[0].spec.lane).wait(rules.max_batch_size)
        due = min(one.queued_at for one in lane) + delay_s
        if delay_s > 0 and due <= now:
            return sums[-1], now
        if best:
            return best, now
        if delay_s <= 0 or closed or sums[-1] >= max(rules.sizes) or sums[-1] >= enough:
            return sums[-1], now
        return sums[-1], due

    def _preferred(self, rules: BatchRules, sums: list[int], next_one: TensorRequest | None) -> int:
        largest, met = max(rules.sizes), [each for each in sums if each in rules.sizes]
        if met:
            return met[-1]
        for before, after in zip(sums, [*sums[1:], sums[-1] + next_one.num_rows if next_one else 0], strict=True):
            if after > largest:
                return before
        return 0

    def candidates(self, now: float) -> list[Candidate]:
        """The best lane of each model that has a free instance, by place."""
        found = []
        for key, model in self.models.items():
            if all(number in model.busy for number in range(len(model.rules.instances))):
                continue
            ready = [
                (self.place(lane[0]), name)
                for name, lane in self.lanes_of(key).items()
                if self.next_batch(model.rules, lane, now)[1] <= now
            ]
            if ready:
                place, name = min(ready)
                found.append((place, key, name))
        return sorted(found)

    def dispatch(self, now: float) -> tuple[Batch, ...]:
        for request in self.waiting:
            if request.first_scheduled_at is None and self.go_behind.get(request.request_id, now + 1.0) <= now:
                request.behind = True
        batches: list[Batch] = []
        while found := self._batches_by_turns(now):  # until none may go
            batches += found
        return tuple(batches)

    def _batches_by_turns(self, now: float) -> list[Batch]:
        """What one model lacks of resources is kept for it until the others have had their turns."""
        batches: list[Batch] = []
        short: set[Key] = set()
        while not (self.llm_has_rows and self.share_at > now):
            all_of_them = self.candidates(now)
            left = [each for each in all_of_them if each[1] not in short]
            if not left:
                break
            turn = self._whose_turn(left[0], all_of_them)
            number = None if turn[1] in short else self._free_instance(turn[1])
            if number is None:
                short |= {left[0][1], turn[1]}
                continue
            batches.append(self._start(turn[1], turn[2], number, now))
        return batches

    def _whose_turn(self, first: Candidate, others: list[Candidate]) -> Candidate:
        if self._any_unlimited(first[1]):
            return first
        names = self._names(first[1])
        rivals = [one for one in others if names & self._names(one[1]) and not self._any_unlimited(one[1])]
        return min(rivals, key=lambda one: (self.models[one[1]].turns, one[0]))

    def _any_unlimited(self, key: Key) -> bool:
        model = self.models[key]
        return any(not each.resources and number not in model.busy for number, each in enumerate(model.rules.instances))

    def _names(self, key: Key) -> set[str]:
        return {name for instance in self.models[key].rules.instances for name, _ in instance.resources}

    def _free_instance(self, key: Key) -> int | None:
        model = self.models[key]
        total: dict[str, int] = {}
        used: dict[str, int] = {}
        for each in self.models.values():
            for instance in each.rules.instances:
                for name, count in instance.resources:
                    total[name] = max(count, total.get(name, 0))
            for number, rules in each.busy.items():
                for name, count in rules.instances[number].resources:
                    used[name] = used.get(name, 0) + count
        by_need = sorted(enumerate(model.rules.instances), key=lambda each: (bool(each[1].resources), each[0]))
        for number, instance in by_need:
            fits = all(used.get(name, 0) + count <= total[name] for name, count in instance.resources)
            if number not in model.busy and fits:
                return number
        return None

    def _start(self, key: Key, name: LaneKey, number: int, now: float) -> Batch:
        model = self.models[key]
        left, taken = self.next_batch(model.rules, self.lanes_of(key)[name], now)[0], list[TensorRequest]()
        while lane := self.lanes_of(key).get(name):
            if taken and (lane[0].num_rows > left or lane[0].num_losses or taken[0].num_losses):
                break
            left -= lane[0].num_rows
            taken.append(lane[0])
            self._take(lane[0], now)
            if left <= 0:
                break
        rows, instance = sum(one.num_rows for one in taken), model.rules.instances[number]
        model.busy[number] = model.rules
        if instance.resources:
            self.turns_now = model.turns
            model.turns += max(1, instance.weight)
        foretold_s = None
        if self.llm_has_rows:
            foretold_s = self.pace(name).seconds(rows)
            self.share_at = max(self.share_at, now) + foretold_s * model.rules.machine_share / self.tensor_share
        batch = Batch(self.num_batches, name, number, tuple(one.request_id for one in taken), rows)
        self.running[self.num_batches] = (batch, taken, model.rules.machine_share, foretold_s)
        self.num_batches += 1
        return batch

    def _take(self, request: TensorRequest, now: float) -> None:
        rule, first = self.policy.groups, request.first_scheduled_at is None
        if rule is not None:
            rule.on_started(request)
        self.waiting.remove(request)
        request.status, request.num_computed = RUNNING, request.num_inputs
        if first:
            request.first_scheduled_at = now
            if rule is not None:
                rule.on_scheduled(request, request.num_inputs)

    def completed(self, number: int, outcome: BatchOutcome, over: Iterable[str]) -> None:
        """`over` are given up, or at their end in another way, though the batch was lost."""
        batch, requests, machine_share, foretold_s = self.running.pop(number)
        del self.models[batch.lane[:2]].busy[batch.instance]
        seconds = outcome.compute_us / 1e6
        if foretold_s is not None:
            self.share_at += (seconds - foretold_s) * machine_share / self.tensor_share
        if not outcome.lost:
            self.pace(batch.lane).ran(batch.num_rows, seconds, 0.0)
        for request in requests:
            if outcome.lost and request.request_id not in over:
                request.num_losses += 1
                request.status, request.num_computed = WAITING, 0
                self._enqueue(request)

    def reorder(self, policy: Policy, tensor_share: float) -> None:
        waiting = sorted(self.waiting, key=self.place)
        self.policy, self.tensor_share = policy, tensor_share
        for request in waiting:
            if policy.groups is not None:
                policy.groups.on_queued(request)
        for request in (*waiting, *(one for _, requests, _, _ in self.running.values() for one in requests)):
            request.key = policy.order(request)
