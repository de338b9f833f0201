"""The drafter of an engine: settled before anything is loaded, made beside its executor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, cast

from maitred.config import EngineConfig
from maitred.core.errors import CheckpointError, ConfigError, KernelError
from maitred.engine.memory import DraftMemory
from maitred.executor.state import Proposer
from maitred.executor.text_drafts import NGramProposer, PredictionProposer
from maitred.model.checkpoint import Checkpoint, folder_beside, name_beside, open_checkpoint

if TYPE_CHECKING:
    from maitred.engine.executors import BuiltExecutor, ExecutorPlan
    from maitred.executor.drafter import HeadPlan
    from maitred.executor.native import NativeExecutor
    from maitred.executor.native_plan import NativePlan
    from maitred.model.head import HeadCheckpoint, MtpLayer

_CALLED = {"draft": "draft model", "mtp": "head"}
_LOOKED_FOR = {"auto": ("mtp", "", "draft"), "draft": ("draft",), "mtp": ("mtp", ""), "ngram": ()}
"""What is looked for beside the served model, and, without a name, in its checkpoint; the first that can draft is
taken."""


class DraftPlan(NamedTuple):
    """The drafter: `model` for a draft model, `head` for a draft head."""

    name: str
    source: str = ""  # of its weights
    model: NativePlan | None = None
    head: HeadPlan | None = None

    @property
    def memory(self) -> DraftMemory | None:
        if self.head is not None:
            return DraftMemory(self.head.weights_bytes)
        return DraftMemory(self.model.weights_bytes, self.model.bytes_per_block) if self.model is not None else None

    def available_bytes(self, available_bytes: int) -> int:
        """Bytes left for weights and caches, of those that a drafter's buffers share."""
        if self.head is not None:
            return max(available_bytes - self.head.buffer_bytes, 0)
        return available_bytes if self.model is None else self.model.available_bytes(available_bytes)

    def describe(self, num_drafts: int) -> str:
        """A line for the terminal."""
        by = self.name
        if self.model is not None:
            by = f"{self.source}: {self.model.describe().removeprefix(self.model.name).strip()}"
        if self.head is not None:
            by = f"{self.source}: {self.head.describe()}"
        return f"drafts  at most {num_drafts} a step, by {by}"


Plans = tuple["ExecutorPlan", DraftPlan | None]


def plan_drafts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    executor: ExecutorPlan,
    *,
    with_taps: Callable[[tuple[int, ...]], ExecutorPlan],
    num_threads: Callable[[Checkpoint], int],
    files: ExitStack,
    tell: Callable[[str], None],
) -> Plans:
    """The executor's plan, which a draft head changes, and the drafter's beside it; None without a drafter.

    `with_taps` plans the executor so that a head reads along after these layers; `num_threads` are of a draft model;
    `files` keeps checkpoints open. `tell` is told of what lies beside the served model and cannot draft for it; what
    was asked for raises ConfigError then, and so does asking an executor that makes no drafts.
    """
    wanted, named = config.speculative.speculative, config.speculative.speculative_model
    if executor.name != "native":
        _refuse_elsewhere(wanted, named, executor.name)
        return executor, None
    if wanted == "off":
        return executor, None
    from maitred.model.head import mtp_layer, open_head  # noqa: PLC0415  numpy

    for kind, folder in _candidates(wanted, named, checkpoint):
        try:
            if not folder:
                if (layer := mtp_layer(checkpoint)) is not None:
                    return _plan_head(config, layer, checkpoint.name, with_taps)
                continue
            drafter = files.enter_context(open_checkpoint(folder))
            if (kind or _kind_of(drafter, wanted)) == "mtp":
                head = open_head(drafter.folder, checkpoint, drafter.name)
                files.callback(head.close)
                return _plan_head(config, head, drafter.name, with_taps)
            return executor, _plan_model(config, checkpoint, drafter, num_threads(drafter))
        except (CheckpointError, ConfigError, KernelError) as error:
            if wanted != "auto" or named is not None:
                raise ConfigError(str(error)) from error
            tell(f"drafts  not by {folder or 'its MTP layer'}: {error}")
    if wanted in _CALLED:
        raise ConfigError(
            f"speculative is {wanted!r}, and beside {checkpoint.name} there is no {name_beside(checkpoint, wanted)}"
            f"{', nor an MTP layer in it' if wanted == 'mtp' else ''}; name a {_CALLED[wanted]} by --speculative-model"
        )
    return executor, DraftPlan("ngram")


def _refuse_elsewhere(wanted: str, named: str | None, executor: str) -> None:
    if wanted not in ("auto", "off") or named is not None:
        raise ConfigError(
            f"speculative is {wanted!r}, and the {executor} executor makes no drafts; leave it out, or serve "
            "with --executor native on a CPU"
        )


def _candidates(wanted: str, named: str | None, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Kind and folder of possible drafters; no folder is the checkpoint itself, and the kind of a named one is not
    known yet."""
    if named is not None:
        return [("", named)]
    found = [(kind, folder_beside(checkpoint, kind) if kind else "") for kind in _LOOKED_FOR[wanted]]
    return [(kind, str(folder)) for kind, folder in found if folder is not None]


def _kind_of(drafter: Checkpoint, wanted: str) -> str:
    """Raises ConfigError for another kind than was asked for."""
    from maitred.model.head import is_head  # noqa: PLC0415  numpy

    kind = "mtp" if is_head(drafter.config) else "draft"
    if wanted not in ("auto", kind):
        raise ConfigError(
            f"speculative is {wanted!r}, and {drafter.name} is a {_CALLED[kind]}; ask for {kind}, or auto"
        )
    return kind


def _plan_model(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint, num_threads: int) -> DraftPlan:
    from maitred.executor.drafter import plan_draft  # noqa: PLC0415  the library itself

    plan = plan_draft(
        config.model, checkpoint, draft, cache=config.cache, scheduler=config.scheduler, num_threads=num_threads
    )
    return DraftPlan("draft", draft.name, model=plan)


def _plan_head(
    config: EngineConfig,
    head: HeadCheckpoint | MtpLayer,
    source: str,
    with_taps: Callable[[tuple[int, ...]], ExecutorPlan],
) -> Plans:
    from maitred.executor.drafter import plan_head  # noqa: PLC0415  the library itself

    executor = with_taps(head.spec.taps)
    plan = plan_head(cast("NativePlan", executor), head, max_rows=config.scheduler.max_num_seqs)
    return executor, DraftPlan("mtp", source, head=plan)


def make_proposer(
    plan: DraftPlan,
    executor: BuiltExecutor,
    *,
    num_blocks: int,
    max_model_len: int,
    on_packed: Callable[[int, int], None],
) -> tuple[Proposer, str]:
    """The drafter of this executor, on its threads, and where its weights came from."""
    proposer, story = _make(plan, executor, num_blocks, max_model_len, on_packed)
    return PredictionProposer(proposer), story


def _make(
    plan: DraftPlan, executor: BuiltExecutor, num_blocks: int, max_model_len: int, on_packed: Callable[[int, int], None]
) -> tuple[Proposer, str]:
    if plan.head is not None:
        from maitred.executor.drafter import head_proposer  # noqa: PLC0415  the library itself

        served = cast("NativeExecutor", executor)
        return head_proposer(plan.head, served, max_model_len=max_model_len, on_packed=on_packed)
    if plan.model is not None:
        from maitred.executor.drafter import draft_proposer  # noqa: PLC0415  the library itself

        return draft_proposer(
            plan.model, executor.threads, num_blocks=num_blocks, max_model_len=max_model_len, on_packed=on_packed
        )
    return NGramProposer(), ""
