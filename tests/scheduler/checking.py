"""An executor that knows what every KV slot holds, and objects when a row would read something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from maitred.core.request import RequestState
from maitred.core.step import BlockCopy, ModelOutput, NewRequest, ScheduledRow, SchedulerOutput, StateSave
from maitred.executor.state import PageTables
from maitred.kv.manager import PoolRow
from maitred.kv.pages import KVGroups
from tests.fakes import FakeExecutor, TokenAt, token_at

Slots = dict[int, list[int | None]]
History = list[int]  # a hash of all tokens up to each


class State(NamedTuple):
    """What a recurrent layer has of the tokens that it has consumed."""

    num_tokens: int = 0
    value: int | None = None

    def after(self, token: int) -> State:
        return State(self.num_tokens + 1, hash((self.value, token)))


class CheckingExecutor(FakeExecutor):
    """Models the contents of the cache: a slot holds a hash of all tokens up to its own.

    Asserts for each row that positions before `start` hold its own history before the step, that the written blocks
    belong to nobody else, and that the whole history is there after the step. A wrong share, a missing copy, a block
    freed too early or found under a wrong hash, a rejected draft that is taken for a token all fail here.

    Requests with a state slot have a state, too, of what the slot's rows consumed; drafts and a last token that may be
    computed again are consumed when the next row's start says that they stood.
    """

    def __init__(
        self,
        block_size: int,
        token_at: TokenAt = token_at,
        draft_at: TokenAt | None = None,
        groups: KVGroups | None = None,
    ) -> None:
        """With `groups` of layers, slots are those of pages, and each group is checked as far as its window sees."""
        super().__init__(token_at, draft_at)
        self._block_size = block_size
        self._pages = PageTables(groups) if groups is not None else None
        kinds = zip(groups.windows, groups.counts, strict=True) if groups is not None else [(None, 1)]
        self._windows = [window for window, count in kinds for _ in range(count)]  # of each group
        self._slots: Slots = {}
        self._host: Slots = {}
        self._tables: dict[str, list[int]] = {}
        self._histories: dict[str, History] = {}
        self._tokens: dict[str, list[int]] = {}
        self.states: dict[int, State] = {}  # by slot
        self._state_slots: dict[str, int] = {}
        self._pending: dict[str, list[int]] = {}

    def write(self, rows: Sequence[PoolRow], request: RequestState) -> None:
        """What another engine computed of its tokens comes to these rows."""
        history: list[int] = []
        for token in (*request.spec.prompt_token_ids, *request.output_token_ids):
            history.append(hash((history[-1] if history else None, token)))
        for row in rows:
            begin = row.place * self._block_size
            self._slots[row.number] = list(history[begin : begin + self._block_size])

    def bring(self, blocks: Sequence[int], request: RequestState, start: int) -> None:
        """What another engine computed of its tokens from `start` on comes to these blocks."""
        self.write([PoolRow(start // self._block_size + i, 0, block) for i, block in enumerate(blocks)], request)

    def spoil(self, rows: Sequence[PoolRow]) -> None:
        """What came to these rows is not what it should be."""
        for row in rows:
            self._slots[row.number] = [-1] * self._block_size

    def contents(self, rows: Sequence[PoolRow]) -> list[list[int | None]]:
        return [list(self._block(row.number)) for row in rows]

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        output = super().execute(plan)
        for request_id in plan.forgotten_request_ids:
            del self._tables[request_id], self._histories[request_id]
        for new in plan.new_requests:
            self._meet(new)
        self._move(plan)
        self._compute(plan.rows)
        for copied in plan.state_copies:
            self.states[copied.target] = self.states[copied.source]
        for row in plan.rows:
            if row.request_id in self._state_slots:
                self._consume(row, [save for save in plan.state_saves if save.request_id == row.request_id])
        for row in output.rows:
            self._learn(row.request_id, row.token_ids)
        num_accepted = {row.request_id: row.num_accepted for row in output.rows}
        for row in plan.rows:
            if row.num_drafts:
                end = row.start + row.num_known + num_accepted[row.request_id]
                del self._tables[row.request_id][-(-end // self._block_size) :]
        return output

    def _move(self, plan: SchedulerOutput) -> None:
        for copy in plan.swap_outs:
            self._host[copy.target] = list(self._block(copy.source))
        assert len({copy.target for copy in plan.swap_outs}) == len(plan.swap_outs), "two copies to one host block"
        if self._pages is None:
            self._copy(plan.block_copies)
            assert not {copy.target for copy in plan.swap_ins} & {copy.target for copy in plan.block_copies}
        else:
            copy = self._pages.take(plan, lambda pairs: self._copy(tuple(BlockCopy(*pair) for pair in pairs)))
            copy(plan.block_copies)
        for copy in plan.swap_ins:
            self._slots[copy.target] = list(self._host[copy.source])

    def _meet(self, new: NewRequest) -> None:
        request_id = new.request_id
        self._tables[request_id], self._histories[request_id], self._tokens[request_id] = [], [], []
        if new.state_slot is not None:
            self._state_slots[request_id], self._pending[request_id] = new.state_slot, []
        self._learn(request_id, (*new.spec.prompt_token_ids, *new.output_token_ids))

    def _learn(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        history = self._histories[request_id]
        self._tokens[request_id] += token_ids
        for token in token_ids:
            history.append(hash((history[-1] if history else None, token)))

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        at_once = {copy.target: list(self._block(copy.source)) for copy in copies}
        for copy in copies:
            self._slots[copy.target] = list(self._block(copy.source))
        assert len(at_once) == len(copies), "two copies to one block"
        assert all(self._slots[block] == slots for block, slots in at_once.items()), "copies depend on their order"

    def _compute(self, rows: tuple[ScheduledRow, ...]) -> None:
        for row in rows:
            table = self._tables[row.request_id]
            for index, block in row.replaced_blocks:
                table[index] = block
            table.extend(row.new_block_ids)
            self._assert_holds_history(row, row.start)
        for row in rows:
            self._write(row)
        for row in rows:
            self._assert_holds_history(row, row.start + row.num_known)

    def _write(self, row: ScheduledRow) -> None:
        table, history = self._tables[row.request_id], self._histories[row.request_id]
        history = history[: row.start + row.num_known]
        for position in range(len(history), row.start + row.num_tokens):
            history.append(hash((history[-1], self._draft_at(row.request_id, position))))
        others = {b for other, blocks in self._tables.items() if other != row.request_id for b in blocks}
        for position in range(row.start, row.start + row.num_tokens):
            block = table[position // self._block_size]
            assert block not in others, f"{row.request_id} writes block {block}, which others hold too"
            for group in range(len(self._windows)):
                self._block(self._page(group, block))[position % self._block_size] = history[position]

    def _consume(self, row: ScheduledRow, saves: Sequence[StateSave]) -> None:
        request_id, slot, history = row.request_id, self._state_slots[row.request_id], self._histories[row.request_id]
        state = self.states[slot] if row.start else State()
        certain = self._pending[request_id][: row.start - state.num_tokens] if row.start else []
        assert state.num_tokens + len(certain) == row.start, f"{request_id} goes on from a state of another position"
        known = self._tokens[request_id][row.start : row.start + row.num_known]
        uncertain = [known.pop()] if row.samples else []
        positions = [save.position for save in saves]
        assert positions == sorted(set(positions))
        assert all(row.start <= position <= row.start + len(known) for position in positions)
        for token in (*certain, *known, None):
            self.states |= {save.slot: state for save in saves if save.position == state.num_tokens}
            state = state.after(token) if token is not None else state
        assert state.value == ([None, *history])[state.num_tokens], f"{request_id} has the state of other tokens"
        self.states[slot] = state
        drafts = range(row.start + row.num_known, row.start + row.num_tokens)
        self._pending[request_id] = uncertain + [self._draft_at(request_id, position) for position in drafts]

    def _assert_holds_history(self, row: ScheduledRow, end: int) -> None:
        table, history = self._tables[row.request_id], self._histories[row.request_id]
        for group, window in enumerate(self._windows):
            seen = range(max(0, row.start + 1 - window) if window is not None else 0, end)
            pages = {i: self._page(group, table[i]) for i in {i // self._block_size for i in seen}}
            held = [self._block(pages[i // self._block_size])[i % self._block_size] for i in seen]
            assert held == history[seen.start : end], f"{row.request_id} reads what is not its own"

    def _page(self, group: int, block: int) -> int:
        return block if self._pages is None else int(self._pages.of([block])[group, 0])

    def _block(self, block: int) -> list[int | None]:
        return self._slots.setdefault(block, [None] * self._block_size)
