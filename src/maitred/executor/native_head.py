"""A head in the native library: its program over the served model's pool, and chains of its own states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from maitred.executor.native import NativeExecutor
from maitred.executor.native_draft import chain_rows, step_of
from maitred.executor.native_plan import NativePlan
from maitred.executor.native_program import Int32s, NativeProgram, most_logits
from maitred.kernels.sampler import Sampler
from maitred.model.head import HeadCheckpoint, compile_head, own_weights
from maitred.model.packed import OnPacked, PackedWeights, plan_weights, total_bytes
from maitred.model.packed_cache import load_weights
from maitred.model.program import Program
from maitred.speculative.draft import ChainEnd, DraftTokens, Piece
from maitred.speculative.mtp import WAITING_BYTES, Head, Taps


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """Memory of a head beside the served model, known before any of it is taken."""

    program: Program
    checkpoint: HeadCheckpoint
    served: NativePlan
    max_rows: int

    @property
    def own(self) -> Program:
        """Return what is loaded for it: the embedding is the served model's, of which a rank has a part only."""
        return own_weights(self.program) if self._shares_embedding else self.program

    @property
    def weights_bytes(self) -> int:
        return total_bytes(plan_weights(self.own))

    @property
    def buffer_bytes(self) -> int:
        """Rows of its program, the taps that the served one leaves, and those that wait."""
        head = self.checkpoint.spec
        decoder = head.decoder
        widths = 8 * decoder.hidden_size + 3 * decoder.q_width + decoder.intermediate_size + 3 * head.tap_width
        return 4 * (self.served.max_tokens * widths + self.max_rows * decoder.vocab_size) + WAITING_BYTES

    def describe(self) -> str:
        """A line for the terminal."""
        taps = ", ".join(str(tap) for tap in self.checkpoint.spec.taps)
        return f"a head on layers {taps}, weights {self.program.formats.linears}"

    def load(
        self, executor: NativeExecutor, *, max_model_len: int, on_packed: OnPacked | None = None
    ) -> tuple[NativeProgram, str]:
        """Raises CheckpointError or OutOfMemory."""
        served, own = self.served, self.own
        loaded = load_weights(
            own, self.checkpoint, executor.threads, isa=served.isa, cache=served.weight_cache, on_packed=on_packed
        )
        weights = loaded.weights
        if self._shares_embedding:
            embedding = cast(NativeProgram, executor.runner).weights["embedding"]
            weights = PackedWeights({**weights.tensors, "embedding": embedding})
        program = NativeProgram(
            self.program,
            weights,
            executor.pool,
            executor.threads,
            max_tokens=served.max_tokens,
            max_logits=self.max_rows,
            max_model_len=max_model_len,
            isa=served.isa,
        )
        return program, loaded.summary

    @property
    def _shares_embedding(self) -> bool:
        return self.served.num_ranks == 1 and not self.checkpoint.has_embedding


class NativeHeadRunner:
    """Runs a head (`speculative.mtp.HeadRunner`)."""

    def __init__(self, program: NativeProgram, sampler: Sampler, vocabulary: Int32s | None, max_positions: int) -> None:
        """`vocabulary` has the served model's token of each that the head may say; None where they are the same."""
        assert program.taps is not None
        self._program, self._sampler, self._vocabulary, self._taps = program, sampler, vocabulary, program.taps
        self.max_tokens = program.max_tokens
        self.max_rows = min(program.max_tokens, program.max_logits)
        self.max_positions = max_positions

    def compute(self, pieces: Sequence[Piece], taps: Sequence[Taps]) -> None:
        self._give(taps)
        self._program.run(step_of(pieces), ())

    def chain(self, pieces: Sequence[Piece], taps: Sequence[Taps], ends: Sequence[ChainEnd]) -> list[DraftTokens]:
        self._give(taps)
        return chain_rows(self._program, self._sampler, pieces, ends, ahead=1, vocabulary=self._vocabulary)

    def close(self) -> None:
        self._program.close()
        del self._program, self._sampler, self._taps

    def _give(self, taps: Sequence[Taps]) -> None:
        first = 0
        for rows in taps:
            self._taps[first : first + len(rows)] = rows
            first += len(rows)


def plan_head(served: NativePlan, checkpoint: HeadCheckpoint, *, max_rows: int) -> HeadPlan:
    """Settle formats and memory of a head beside the served model, for `max_rows` requests of a step at most.

    Raises KernelError for a matrix that no kernel takes.
    """
    program = compile_head(checkpoint.spec, served.program.formats, served.spec.num_layers)
    plan_weights(program)
    rows = most_logits(checkpoint.spec.decoder.vocab_size, max_rows)
    return HeadPlan(program=program, checkpoint=checkpoint, served=served, max_rows=min(rows, served.max_tokens))


def head_proposer(
    plan: HeadPlan, executor: NativeExecutor, *, max_model_len: int, on_packed: OnPacked | None = None
) -> tuple[Head, str]:
    """The head, loaded and told of the executor's steps, and where its weights came from.

    Raises CheckpointError or OutOfMemory.
    """
    width = plan.checkpoint.spec.tap_width
    context = min(max_model_len, plan.checkpoint.spec.decoder.max_position_embeddings)
    program, summary = plan.load(executor, max_model_len=context, on_packed=on_packed)
    sampler = Sampler(executor.threads, isa=plan.served.isa)
    head = Head(NativeHeadRunner(program, sampler, plan.checkpoint.draft_to_target, context), tap_width=width)
    executor.head = head
    return head, summary
