"""Who drafts for an engine: settled before anything is loaded, made beside its executor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from maitred.config import EngineConfig
from maitred.engine.memory import DraftMemory
from maitred.errors import CheckpointError, ConfigError, KernelError
from maitred.model.checkpoint import Checkpoint, folder_beside, open_checkpoint
from maitred.speculative.ngram import NGramProposer
from maitred.speculative.prediction import PredictionProposer
from maitred.speculative.proposer import Proposer

if TYPE_CHECKING:
    from maitred.engine.executors import ExecutorPlan
    from maitred.executor.native_plan import NativePlan


class DraftPlan(NamedTuple):
    """Who drafts. `model` where a draft model does."""

    name: str
    model: NativePlan | None = None

    @property
    def memory(self) -> DraftMemory | None:
        model = self.model
        return DraftMemory(model.weights_bytes, model.bytes_per_block) if model is not None else None

    def available_bytes(self, available_bytes: int) -> int:
        """What is left for weights and caches, where so much is for those and a draft model's buffers."""
        return available_bytes if self.model is None else self.model.available_bytes(available_bytes)

    def describe(self, num_drafts: int) -> str:
        """A line for the terminal."""
        model, by = self.model, self.name
        if model is not None:
            by = f"{model.checkpoint.name}: {model.describe().removeprefix(model.name).strip()}"
        return f"drafts  at most {num_drafts} a step, by {by}"


def plan_drafts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    executor: ExecutorPlan,
    num_threads: Callable[[Checkpoint], int],
    files: ExitStack,
    tell: Callable[[str], None],
) -> DraftPlan | None:
    """None where nobody drafts. `num_threads` of a draft model; `files` keeps its checkpoint open.

    `tell` is told of a draft model that lies beside the served one and cannot be its own; one that was asked for raises
    ConfigError then, and so does asking an executor that makes no drafts.
    """
    wanted, folder = config.speculative.speculative, config.speculative.speculative_model
    if executor.name != "native":
        if wanted not in ("auto", "off") or folder is not None:
            raise ConfigError(
                f"speculative is {wanted!r}, and the {executor.name} executor makes no drafts; leave it out, or serve "
                "with --executor native on a CPU"
            )
        return None
    if wanted == "off":
        return None
    found = folder or folder_beside(checkpoint, "draft")
    if wanted == "draft" and found is None:
        raise ConfigError(
            f"speculative is 'draft', and beside {checkpoint.name} there is no {checkpoint.folder.name}-draft; name a "
            "draft model by --speculative-model"
        )
    if wanted == "ngram" or found is None:
        return DraftPlan("ngram")
    try:
        draft = files.enter_context(open_checkpoint(str(found)))
        return DraftPlan("draft", _plan_model(config, checkpoint, draft, num_threads(draft)))
    except (CheckpointError, ConfigError, KernelError) as error:
        if wanted == "draft" or folder is not None:
            raise ConfigError(str(error)) from error
        tell(f"drafts  not by {found}: {error}")
        return DraftPlan("ngram")


def _plan_model(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint, num_threads: int) -> NativePlan:
    from maitred.executor.native_draft import plan_draft  # noqa: PLC0415  the library itself

    return plan_draft(
        config.model, checkpoint, draft, cache=config.cache, scheduler=config.scheduler, num_threads=num_threads
    )


def make_proposer(
    plan: DraftPlan, threads: object, *, num_blocks: int, max_model_len: int, on_packed: Callable[[int, int], None]
) -> tuple[Proposer, str]:
    """Who drafts for an executor that runs on these threads, and where its weights came from."""
    if plan.model is None:
        return PredictionProposer(NGramProposer()), ""
    from maitred.executor.native_draft import draft_proposer  # noqa: PLC0415  the library itself

    proposer, story = draft_proposer(
        plan.model, threads, num_blocks=num_blocks, max_model_len=max_model_len, on_packed=on_packed
    )
    return PredictionProposer(proposer), story
