"""What a model is worth, measured on the native executor in the format that is served, beside its parent.

Documents are counted one by one, so that a figure's interval comes of drawing documents again (paired bootstrap, Efron
1979; Koehn 2004 for two systems on the same documents).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.config import SpeculativeConfig
from maitred.core.errors import CheckpointError, ConfigError
from maitred.core.request import FinishReason, RequestSpec, RequestState, SamplingParams
from maitred.engine.intake import make_requests
from maitred.engine.llm import LLM
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.output import RequestOutput
from maitred.model.checkpoint import Checkpoint, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.optimize.data import ENGINE, Document, Progress, Task, text_of
from maitred.text.parts import FolderText

Table = NDArray[np.float64]  # [documents, counts]
Figure = Callable[[Table], Table]  # of sums of the table's rows, [..., counts] -> [...]
DRAWS = 1000
LOGITS = 2**24  # of a step, so that those of two models fit beside them whatever their vocabulary
ROWS = 64
ANSWER_TOKENS = 128
DRAFTED_TOKENS = 64
TIMED_TOKENS, TIMINGS = 33, 24


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float
    drawn: int  # documents, tasks or timings that it comes of


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures by name, and scores of tasks by category."""

    figures: Mapping[str, Interval]
    tasks: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    """By category: `score`, and beside a parent its `parent` and the `drop`."""
    num_positions: int = 0


def intervals(table: Table, figures: Mapping[str, Figure], seed: int) -> dict[str, Interval]:
    """Figures of the table's sums; the interval is of sums over rows drawn again, the same for all figures."""
    count = len(table)
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    drawn, whole = times @ table, table.sum(axis=0)
    found = {}
    for name, figure in figures.items():
        low, high = np.quantile(figure(drawn), (0.025, 0.975))
        found[name] = Interval(float(figure(whole)), float(low), float(high), count)
    return found


def evaluate(
    model: str,
    *,
    against: Checkpoint | None = None,
    documents: Sequence[Document],
    tasks: Sequence[Task] = (),
    seed: int = 0,
    served: Mapping[str, Any] | None = None,
    draft: str | None = None,
    gain: bool = False,
    progress: Progress = lambda done, total, words: None,
) -> Evaluation:
    """`model` as it is served, with the engine's arguments `served` (an adapter that `lora` names among them is used),
    against its parent in float32.

    `draft` is a draft model or a head, whose acceptance is measured; `gain` asks for the speed of decoding over the
    parent as that is served, which with a draft is the model without. Raises ConfigError for models of unlike
    vocabularies and prompts that do not fit, CheckpointError for logits that are no numbers.
    """
    with open_checkpoint(model) as checkpoint:
        asks, spec = [_prompt(task, text_of(checkpoint)) for task in tasks], spec_from_config(checkpoint.config)
    if against is not None and (other := spec_from_config(against.config).vocab_size) != spec.vocab_size:
        raise ConfigError(f"{model} has {spec.vocab_size} tokens, its parent {other}; only equal ones can be compared")
    longest = [len(each.ids) + 1 for each in documents] + [ask.num_tokens + ANSWER_TOKENS for ask in asks]
    common = {
        **ENGINE,
        "max_num_batched_tokens": max(ENGINE["max_num_seqs"], min(512, LOGITS // spec.vocab_size)),
        "max_model_len": min(spec.max_position_embeddings, max(*longest, 256)),
    }
    own = {**common, **(served or {})}
    scores: dict[str, dict[str, Interval]] = {}
    with ExitStack() as stack:
        child, parent = stack.enter_context(LLM(model, **own)), None
        if against is not None:
            exact = {**common, "dtype": "float32", "kv_dtype": "float32"}
            parent = stack.enter_context(LLM(str(against.path), **exact))
        table = _read(child, parent, documents, progress)
        figures = intervals(table, _ALONE if parent is None else _AGAINST, seed)
        if asks:
            scores = _task_scores(child, parent, asks, seed, progress)
            figures |= {f"task_{name}": each for name, each in scores.pop("").items()}
    drafts = {**own, "speculative": "auto", "speculative_model": draft}
    if draft is not None:
        with LLM(model, **drafts) as drafting:
            figures |= intervals(_accepted(drafting, documents, progress), {"acceptance": _ratio}, seed)
    if gain and draft is not None:
        figures |= _gain((model, drafts), (model, own), documents, seed, progress)
    elif gain and against is not None:
        figures |= _gain((model, own), (str(against.path), common), documents, seed, progress)
    return Evaluation(figures, scores, int(table[:, 0].sum()))


# ---- documents: positions, -log p of the model, of its parent, KL(parent || model), flips


def _ratio(sums: Table) -> Table:
    share: Table = sums[..., 1] / np.maximum(sums[..., 0], 1e-9)
    return share


def _perplexity(sums: Table, column: int = 1) -> Table:
    mean: Table = np.exp(np.minimum(sums[..., column] / sums[..., 0], 700.0))
    return mean


_ALONE: dict[str, Figure] = {"perplexity": _perplexity}
_AGAINST: dict[str, Figure] = {
    "kl": lambda sums: sums[..., 3] / sums[..., 0],
    "flips": lambda sums: sums[..., 4] / sums[..., 0],
    "perplexity_ratio": lambda sums: np.exp(np.clip((sums[..., 1] - sums[..., 2]) / sums[..., 0], -700.0, 700.0)),
    "perplexity": _perplexity,
    "parent_perplexity": lambda sums: _perplexity(sums, 2),
}


def _read(child: LLM, parent: LLM | None, documents: Sequence[Document], progress: Progress) -> Table:
    total = sum(len(document.ids) for document in documents)
    done, table = 0, np.zeros((len(documents), 5))
    for number, document in enumerate(documents):
        progress(done, total, "reading held-out documents")
        done += len(document.ids)
        ids = document.ids.tolist()
        theirs = logits(parent, ids) if parent is not None else repeat(None, len(ids))
        both = zip(logits(child, ids), theirs, strict=True)
        rows = (
            (*each, ids[place]) for place, each in enumerate(both, 1) if place < len(ids) and document.learnt[place]
        )
        while block := list(islice(rows, ROWS)):
            table[number] += _counted(*zip(*block, strict=True))
    return table


def _counted(
    ours: Sequence[NDArray[np.float32]], theirs: Sequence[NDArray[np.float32] | None], targets: Sequence[int]
) -> Table:
    """A row of the table: of logits [V] before each judged token."""
    log_q, rows = _log_softmax(np.stack(ours)), np.arange(len(ours))
    lost = -float(log_q[rows, targets].sum(dtype=np.float64))
    if theirs[0] is None:
        return np.array([len(ours), lost, 0.0, 0.0, 0.0])
    log_p = _log_softmax(np.stack([each for each in theirs if each is not None]))
    flips = int((log_q.argmax(axis=1) != log_p.argmax(axis=1)).sum())
    parent_lost = -float(log_p[rows, targets].sum(dtype=np.float64))
    kl = float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).sum(dtype=np.float64))
    return np.array([len(ours), lost, parent_lost, kl, flips])


def _log_softmax(logits_nV: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits_nV - logits_nV.max(axis=1, keepdims=True)
    found: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    if not np.isfinite(found).all():
        raise CheckpointError("the model's logits are not finite; its weights are damaged, make it anew")
    return found


def logits(llm: LLM, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """Logits [V] of each position in turn, as the engine computes them; nothing else may be asked of it meanwhile."""
    core, executor = llm.parts.core, llm.parts.executor
    seen: deque[NDArray[np.float32]] = deque()
    with llm.holding(_adapter(llm)) as adapter:
        state = core.add(_request(llm, ids, "logits", 1, adapter))
        executor.on_logits = lambda request_id, start, logits_nV: seen.append(logits_nV)
        try:
            while core.has_work and len(ids):
                core.step()
                while seen:
                    yield from seen.popleft()
        finally:
            executor.on_logits = None
            core.finish(state.request_id, FinishReason.ABORT)


def _adapter(llm: LLM) -> str | None:
    """Name of the adapter that is measured, where there is one."""
    return next((facts.name for facts in llm.parts.facts.adapters), None)


def _request(
    llm: LLM, ids: Sequence[int], request_id: str, max_tokens: int, adapter: AdapterFacts | None = None
) -> RequestSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    (spec,) = make_requests(llm.model, list(ids), sampling, request_id=request_id, now=0.0, adapter=adapter)
    return spec


# ---- tasks


class TaskPrompt(NamedTuple):
    """A task as token ids."""

    task: Task
    prompt: list[int]
    choices: tuple[list[int], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + max(map(len, self.choices), default=0)


def _prompt(task: Task, text: FolderText) -> TaskPrompt:
    encode, template = text.tokenizer.encode, text.chat_template
    if template is None:
        prompt = encode("\n".join(str(message.get("content") or "") for message in task.messages))
    else:
        prompt = encode(template.render(task.messages), add_special_tokens=False)
    return TaskPrompt(task, prompt, tuple(encode(choice, add_special_tokens=False) for choice in task.choices))


def _task_scores(
    child: LLM, parent: LLM | None, asks: Sequence[TaskPrompt], seed: int, progress: Progress
) -> dict[str, dict[str, Interval]]:
    """By category; "" for all of them."""
    progress(0, 2, "answering tasks")
    ours = _answered(child, asks)
    progress(1, 2, "answering tasks")
    theirs = _answered(parent, asks) if parent is not None else ours
    table = np.array([(1, mine, other) for mine, other in zip(ours, theirs, strict=True)], dtype=np.float64)
    figures: dict[str, Figure] = {"score": _ratio}
    if parent is not None:
        figures["parent"] = lambda sums: sums[..., 2] / sums[..., 0]
        figures["drop"] = lambda sums: (sums[..., 2] - sums[..., 1]) / sums[..., 0]
    categories = np.array([ask.task.category for ask in asks])
    parts = {category: table[categories == category] for category in dict.fromkeys(categories.tolist())}
    return {category: intervals(rows, figures, seed) for category, rows in {"": table, **parts}.items()}


def _answered(llm: LLM, asks: Sequence[TaskPrompt]) -> list[bool]:
    """Whether each is right; greedy, or the likeliest of the choices."""
    free = [ask for ask in asks if not ask.choices]
    answers = iter(llm.generate([ask.prompt for ask in free], _GREEDY, lora=_adapter(llm))) if free else iter(())
    longer = [[*ask.prompt, *choice] for ask in asks for choice in ask.choices]
    read = iter(llm.generate(longer, _LIKELIHOOD, lora=_adapter(llm))) if longer else iter(())
    right = []
    for ask in asks:
        if not ask.choices:
            right.append(ask.task.is_right(next(answers).outputs[0].text))
            continue
        found = [_likelihood(next(read), len(choice)) for choice in ask.choices]
        right.append(ask.task.choices[int(np.argmax(found))] == ask.task.answer)
    return right


_GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
_LIKELIHOOD = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def _likelihood(output: RequestOutput, num_tokens: int) -> float:
    """Log-probability of a prompt's last tokens."""
    told = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
    return sum(known[token].logprob for token, known in list(told)[-num_tokens:] if known is not None)


# ---- two models, of which the larger is asked where the smaller is not sure

THRESHOLDS = (0.0, *(tenth / 10 for tenth in range(1, 10)), 0.95, 0.99, 1.0)


def cascade(
    small: str,
    large: str,
    tasks: Sequence[Task],
    *,
    seed: int = 0,
    served: Mapping[str, Any] | None = None,
    progress: Progress = lambda done, total, words: None,
) -> dict[float, dict[str, Interval]]:
    """By P of a tier's `escalate_below`: the share of tasks that `large` answers, the score, and its drop from that of
    `large` alone. Choices are answered freely, as a router judges."""
    progress(0, 2, "answering with each model")
    ours, sure = _sureness(small, tasks, served)
    progress(1, 2, "answering with each model")
    theirs, _ = _sureness(large, tasks, served)
    figures: dict[str, Figure] = {
        "escalated": _ratio,
        "score": lambda sums: sums[..., 2] / sums[..., 0],
        "drop": lambda sums: (sums[..., 3] - sums[..., 2]) / sums[..., 0],
    }
    found = {}
    for threshold in THRESHOLDS:
        asked = sure < threshold
        table = np.stack((np.ones_like(ours), asked, np.where(asked, theirs, ours), theirs), axis=1)
        found[threshold] = intervals(table, figures, seed)
    return found


def _sureness(model: str, tasks: Sequence[Task], served: Mapping[str, Any] | None) -> tuple[Table, Table]:
    """Whether each greedy answer is right, and the probability of its least likely token."""
    with open_checkpoint(model) as checkpoint:
        spec, asks = spec_from_config(checkpoint.config), [_prompt(task, text_of(checkpoint)) for task in tasks]
    longest = min(spec.max_position_embeddings, max(ask.num_tokens for ask in asks) + ANSWER_TOKENS)
    with LLM(model, **{**ENGINE, "max_model_len": longest, **(served or {})}) as llm:
        outputs = [each.outputs[0] for each in llm.generate([ask.prompt for ask in asks], replace(_GREEDY, logprobs=0))]
    right = [float(task.is_right(output.text)) for task, output in zip(tasks, outputs, strict=True)]
    told = [[at[token].logprob for token, at in zip(o.token_ids, o.logprobs or (), strict=True)] for o in outputs]
    return np.array(right), np.exp([min(each, default=0.0) for each in told])


# ---- drafts and speed


def _accepted(llm: LLM, documents: Sequence[Document], progress: Progress) -> Table:
    """Drafts made and accepted, of each document's greedy continuation; as many drafts in every step, whether they pay
    on this machine or not."""
    core, most = llm.parts.core, SpeculativeConfig().num_speculative_tokens
    core.scheduler.num_drafts = lambda request, num_rows: most
    states: list[RequestState] = []
    for number, document in enumerate(documents):
        begin = reply_begin(document)
        room = min(DRAFTED_TOKENS, llm.model.max_model_len - begin)
        states.append(core.add(_request(llm, document.ids[:begin].tolist(), f"drafted-{number}", room)))
    while core.has_work:
        progress(sum(state.finished for state in states), len(states), "drafting held-out replies")
        core.step()
    return np.array([(state.num_draft_tokens, state.num_accepted_tokens) for state in states], dtype=np.float64)


def reply_begin(document: Document) -> int:
    """First learnt token of the later half: texts that begin alike would all have one continuation."""
    half = len(document.ids) // 2
    later = np.flatnonzero(document.learnt[half:])
    return max(1, half + int(later[0]) if later.size else int(np.argmax(document.learnt)))


def _gain(
    one: tuple[str, Mapping[str, Any]],
    base: tuple[str, Mapping[str, Any]],
    documents: Sequence[Document],
    seed: int,
    progress: Progress,
) -> dict[str, Interval]:
    """Decoding speed of one over the base's, timed in turn on the same prompts, one stream."""
    sampling = SamplingParams(temperature=0.0, max_tokens=TIMED_TOKENS, ignore_eos=True)
    with LLM(one[0], **one[1]) as ours, LLM(base[0], **base[1]) as theirs:

        def seconds(llm: LLM, prompt: list[int]) -> float:
            timing = llm.generate([prompt], sampling, lora=_adapter(llm))[0].outputs[0].timing
            assert timing is not None
            return timing.decode_s

        rows, prompts = [], [document.ids[:16].tolist() for document in documents]
        for number, prompt in enumerate(islice(cycle(prompts), TIMINGS + 1)):
            progress(number, TIMINGS + 1, "timing")
            first, second = (ours, theirs) if number % 2 else (theirs, ours)
            taken = {first: seconds(first, prompt), second: seconds(second, prompt)}
            rows.append((taken[ours], taken[theirs]))
    return intervals(np.array(rows[1:]), {"gain": _ratio}, seed)  # the first finds cold caches
