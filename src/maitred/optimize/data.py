"""Documents that a tool learns from and is judged on, as token ids, and tasks with their answers.

Where there are none, the parent writes its own, questions included, as in Magpie (Xu et al. 2024, arXiv:2406.08464).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from maitred.config.optimize import ToolConfig
from maitred.core.errors import ConfigError, RequestError
from maitred.core.request import SamplingParams
from maitred.engine.llm import LLM
from maitred.model.checkpoint import Checkpoint
from maitred.model.families import spec_from_config
from maitred.storage.capture import read_captured
from maitred.text.folder import read_chat_template
from maitred.text.marks import MarkedText
from maitred.text.parts import FolderText

T = TypeVar("T")
Progress = Callable[[float, float, str], None]  # (done, total, what is done now)
WINDOW = 2048  # most tokens of a document; a longer one becomes several
HELD_OUT_SHARE = 10
OWN_DOCUMENTS, OWN_BATCH = 256, 32
OWN_QUESTION, OWN_REPLY = 32, 96
OWN_FILE = "own.jsonl"
OWN_JUDGES = (
    "how closely the model follows its parent on texts that the parent wrote; not what either knows of other texts, "
    "nor whether answers are right: --held-out and --tasks tell that"
)
_QUESTION = "maitred question"
ENGINE: dict[str, Any] = {
    "executor": "native",
    "weight_cache": "off",
    "max_num_seqs": OWN_BATCH,
    "speculative": "off",
    "enable_prefix_caching": False,
}
"""Arguments of engines that tools make: as served, and nothing is left on disk."""


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Token ids, with whether each is learnt and judged (a reply's, a text's) or only read (a prompt's)."""

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    line: int = 0  # of its file

    @property
    def key(self) -> bytes:
        """Equal for equal ids."""
        return hashlib.sha256(self.ids.tobytes()).digest()


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A question whose answer is right or wrong; a line of --tasks."""

    messages: list[dict[str, Any]]
    answer: str
    match: Literal["exact", "contains", "regex", "choice"] = "exact"
    choices: tuple[str, ...] = ()  # of `choice`: the likeliest of them is the model's answer
    category: str = "tasks"

    def __post_init__(self) -> None:
        if not self.messages or not self.answer:
            raise ValueError("messages or answer is empty")
        if self.match == "choice" and self.answer not in self.choices:
            raise ValueError(f"match is choice, and choices is {list(self.choices)}; list texts, the answer among them")
        try:
            re.compile(self.answer if self.match == "regex" else "")
        except re.error as error:
            raise ValueError(f"answer {self.answer!r} is no regular expression ({error})") from None

    def is_right(self, text: str) -> bool:
        match self.match:
            case "contains":
                return self.answer.casefold() in text.casefold()
            case "regex":
                return re.search(self.answer, text) is not None
        return text.strip() == self.answer.strip()


class DataLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of --data and --held-out: one of the first three."""

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    num_prompt_tokens: int = 0
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Corpus:
    """What a job learns from, and is judged on."""

    learn: tuple[Document, ...]
    held_out: tuple[Document, ...]
    tasks: tuple[Task, ...]
    is_own: bool  # whether the parent wrote what is learnt
    judged_on_own: bool
    hashes: Mapping[str, str]

    def described(self) -> dict[str, Any]:
        """Of the report."""
        return {
            "learnt": _counts(self.learn),
            "held_out": _counts(self.held_out),
            "tasks": len(self.tasks),
            "sha256": dict(self.hashes),
            "written_by_parent": self.is_own,
            "judges": OWN_JUDGES if self.judged_on_own else "the result, on these held-out documents and tasks",
        }


def _counts(documents: Sequence[Document]) -> dict[str, int]:
    tokens, learnt = sum(each.ids.size for each in documents), sum(int(each.learnt.sum()) for each in documents)
    return {"documents": len(documents), "tokens": tokens, "learnt_tokens": learnt}


def text_of(checkpoint: Checkpoint) -> FolderText:
    """Tokenizer and chat template of a checkpoint; they are read when they are asked for."""
    file = checkpoint.tokenizer_file()
    place = file if checkpoint.gguf is not None else file.parent
    return FolderText(place, read_chat_template(place), num_rows=spec_from_config(checkpoint.config).vocab_size)


def file_hashes(config: ToolConfig) -> dict[str, str]:
    """sha256 of each file of data that is named."""
    files = {"data": config.data, "held_out": config.held_out, "tasks": config.tasks}
    found = {}
    for name, file in files.items():
        if file is not None:
            with _opened(file) as opened:
                found[name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return found


def read_corpus(
    config: ToolConfig, parent: Checkpoint, state: Path, progress: Progress, *, learns: bool = True
) -> Corpus:
    """Raises ConfigError with file and line. What the parent writes is kept in `state`, and gone on with."""
    reader = Reader(parent)
    tasks = read_tasks(config.tasks) if config.tasks is not None else ()
    held_out = reader.read(config.held_out) if config.held_out is not None else None
    if config.data is not None:
        learn = reader.read(config.data)
    elif held_out is not None and not learns:
        learn = []
    else:
        learn = own_documents(parent, state / OWN_FILE, seed=config.seed, progress=progress)
    if held_out is None:
        learn, held_out = parted(learn, config.data or "the parent's own documents")
    elif config.data is not None:
        _refuse_shared(learn, held_out, config)
    is_own, hashes = config.data is None and bool(learn), file_hashes(config)
    if is_own:
        hashes["own"] = hashlib.sha256(b"".join(sorted(each.key for each in [*learn, *held_out]))).hexdigest()
    return Corpus(tuple(learn), tuple(held_out), tasks, is_own, is_own and config.held_out is None, hashes)


def parted(documents: Sequence[Document], source: str) -> tuple[list[Document], list[Document]]:
    """A tenth is held out, by hash: the same documents in any order of lines; equal ones stay together."""
    keys = sorted({document.key for document in documents})
    if len(keys) < HELD_OUT_SHARE:
        raise ConfigError(
            f"{source}: {len(keys)} documents, so none can be held out to judge by; give --held-out, or at least "
            f"{HELD_OUT_SHARE} documents"
        )
    held = set(keys[: len(keys) // HELD_OUT_SHARE])
    return [each for each in documents if each.key not in held], [each for each in documents if each.key in held]


def _refuse_shared(learn: Sequence[Document], held_out: Sequence[Document], config: ToolConfig) -> None:
    lines = {document.key: document.line for document in learn}
    shared = [document for document in held_out if document.key in lines]
    if shared:
        first, more = shared[0], f", and {len(shared) - 1} more" if len(shared) > 1 else ""
        raise ConfigError(
            f"{config.held_out}:{first.line} is the document of {config.data}:{lines[first.key]} as well{more}; what "
            f"was learnt cannot judge: take it out of one of them"
        )


class Reader:
    """Reads JSON lines with the tokenizer and the chat template of a model."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        spec = spec_from_config(checkpoint.config)
        self._text, self._vocab_size = text_of(checkpoint), spec.vocab_size
        self._window = min(WINDOW, spec.max_position_embeddings - 1)  # the engine leaves one for an answer

    def read(self, file: str | Path) -> list[Document]:
        """Raises ConfigError with file and line."""
        found = []
        for number, line in json_lines(file, DataLine):
            try:
                pieces = list(self._pieces(line, number))
            except (RequestError, ValueError) as error:
                raise ConfigError(f"{file}:{number}: {error}") from None
            if not pieces:
                raise ConfigError(
                    f"{file}:{number}: nothing to learn; write {{messages}} with replies, {{text}} or {{token_ids}}"
                )
            found += pieces
        return found

    def _pieces(self, line: DataLine, number: int) -> Iterator[Document]:
        for ids, learnt in self._wholes(line):
            for first in range(0, len(ids), self._window):
                piece = np.array(learnt[first : first + self._window], dtype=np.bool_)
                piece[:1] = False  # before the first there is nothing to tell it from
                if piece.any():
                    yield Document(np.array(ids[first : first + self._window], dtype=np.int32), piece, number)

    def _wholes(self, line: DataLine) -> Iterator[tuple[list[int], list[bool]]]:
        """Raises RequestError and ValueError."""
        if line.messages is not None:
            yield from self._chats(line.messages, {**line.chat_template_kwargs, "tools": line.tools})
        elif line.text is not None:
            ids = self._text.tokenizer.encode(line.text)
            yield ids, [True] * len(ids)
        elif line.token_ids is not None:
            if wrong := [each for each in line.token_ids if not 0 <= each < self._vocab_size]:
                raise ValueError(f"token {wrong[0]} is not in the vocabulary of {self._vocab_size}")
            yield line.token_ids, [index >= line.num_prompt_tokens for index in range(len(line.token_ids))]

    def _chats(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
    ) -> Iterator[tuple[list[int], list[bool]]]:
        """A document with all replies marked; of a template that writes earlier turns otherwise, such as without
        thoughts, one more for each reply that the last rendering does not hold as it was said."""
        template = self._text.chat_template
        if template is None:
            raise ValueError("this model has no chat template; give texts")
        replies = []
        for index, message in enumerate(messages):
            if message.get("role") == "assistant":
                prompt = template.render(messages[:index], **extra)
                written = template.render(messages[: index + 1], add_generation_prompt=False, **extra)
                replies.append((len(os.path.commonprefix((prompt, written))), written))  # noqa: RUF071  by letters
        while replies:
            text = replies[-1][1]
            inside = [reply for reply in replies if text.startswith(str(reply[1]).rstrip())]
            yield self._marked(text, [(first, len(written.rstrip())) for first, written in inside])
            replies = [reply for reply in replies if reply not in inside]

    def _marked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Tokens piece by piece, as served: a prompt is tokenised before its reply is there."""
        ids: list[int] = []
        learnt: list[bool] = []
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        for number, (first, end) in enumerate(pairwise(edges)):
            piece = self._text.tokenizer.encode(_cut(text, first, end), add_special_tokens=False) if end > first else []
            ids += piece
            learnt += [number % 2 == 1] * len(piece)
        return ids, learnt


def _cut(text: str, first: int, end: int) -> str:
    """Part of a prompt; letters of marks in it stay letters."""
    if not isinstance(text, MarkedText):
        return text[first:end]
    spans = [(start - first, stop - first) for start, stop in text.spans if first <= start and stop <= end]
    return MarkedText(text[first:end], spans, text.marks)


def json_lines(file: str | Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Each line that is not empty, with its number. Raises ConfigError, also where there is none."""
    found = False
    with _opened(file) as lines:
        for number, raw in enumerate(lines, 1):
            if raw.strip():
                found = True
                try:
                    yield number, msgspec.json.decode(raw.removeprefix(BOM_UTF8), type=kind)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ConfigError(f"{file}:{number}: {error}; write one JSON object a line") from None
    if not found:
        raise ConfigError(f"{file} is empty; write one JSON object a line")


def _opened(file: str | Path) -> BufferedReader | BytesIO:
    if Path(file).is_dir():
        return BytesIO(read_captured(Path(file)))
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a file of JSON lines") from None


def read_tasks(file: str | Path) -> tuple[Task, ...]:
    """Raises ConfigError with file and line."""
    return tuple(task for _, task in json_lines(file, Task))


# ---- what the parent writes


def own_documents(
    parent: Checkpoint, file: Path, *, seed: int, progress: Progress, count: int = OWN_DOCUMENTS
) -> list[Document]:
    """Documents that the parent writes at temperature 1, each from a seed of its own, so that it does not matter where
    an ended run goes on. `file` keeps them, a batch at a time."""
    with file.open("ab+") as kept:
        kept.seek(0)
        written = kept.read()
        whole = written.rfind(b"\n") + 1  # of a batch that was cut off, the last line is not
        kept.truncate(whole)
        done = written.count(b"\n")
        if done < count:
            context = spec_from_config(parent.config).max_position_embeddings
            with LLM(str(parent.path), max_model_len=min(WINDOW, context), **ENGINE) as llm:
                while done < count:
                    progress(done, count, "the parent writes its own documents")
                    numbers = range(done, min(count, done + OWN_BATCH))
                    lines = _written(llm, [seed * OWN_DOCUMENTS + number for number in numbers])
                    kept.write("".join(f"{json.dumps(line)}\n" for line in lines).encode())
                    kept.flush()
                    os.fsync(kept.fileno())
                    done += len(lines)
    return Reader(parent).read(file)


def _written(llm: LLM, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Lines of documents, learnt from where the parent began to write."""
    template, encode = llm.model.chat_template, llm.get_tokenizer().encode
    if template is None:
        begin = encode("") or list(llm.model.eos_token_ids[:1])
        prompts = [begin] * len(seeds)
        answers = llm.generate(prompts, _sampled(seeds, OWN_QUESTION + OWN_REPLY, ignore_eos=True))
    else:
        shown = template.render([{"role": "user", "content": _QUESTION}], add_generation_prompt=False)
        begin = encode(shown.partition(_QUESTION)[0], add_special_tokens=False)
        questions = [each.outputs[0].text for each in llm.generate([begin] * len(seeds), _sampled(seeds, OWN_QUESTION))]
        chats = [template.render([{"role": "user", "content": text.strip() or "Hello."}]) for text in questions]
        prompts = [encode(chat, add_special_tokens=False) for chat in chats]
        answers = llm.generate(prompts, _sampled(seeds, OWN_REPLY))
    return [
        {"token_ids": [*prompt, *answer.outputs[0].token_ids], "num_prompt_tokens": len(begin)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _sampled(seeds: Iterable[int], max_tokens: int, *, ignore_eos: bool = False) -> list[SamplingParams]:
    return [SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos) for seed in seeds]
