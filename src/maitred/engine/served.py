"""What is served, as the child tells it: facts, and the folder from which the text parts are read again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from maitred.engine.frames import ModelFacts
from maitred.engine.intake import ServedModel
from maitred.errors import MaitredError
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text import ChatTemplate, Tokenizer
from maitred.text.folder import read_named_tokens


def facts_of(model: ServedModel, text_folder: Path) -> ModelFacts:
    """`text_folder` holds the tokenizer's files."""
    return ModelFacts(
        tokenizer_folder=str(text_folder),
        chat_template=model.chat_template.source if model.chat_template is not None else None,
        names=model.names,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        generation_defaults=dict(model.generation_defaults),
        created=model.created,
        root=model.root,
        revision=model.revision,
        block_size=model.block_size,
        footprint=model.footprint,
    )


class TextAhead:
    """Reads the tokenizer in a thread of its own while the engine's process loads the weights."""

    def __init__(self, model: str | None) -> None:
        """`model` as in ModelConfig; only folders are read ahead, for a hub id may have to be downloaded first."""
        self._folder = BUILTIN_FOLDER if model is None else Path(model).expanduser()
        self._tokenizer: Tokenizer | None = None
        self._thread = threading.Thread(target=self._read, name="maitred-text", daemon=True)
        self._thread.start()

    def tokenizer(self, folder: Path) -> Tokenizer:
        """Of this folder, read ahead or now."""
        self._thread.join()
        if self._tokenizer is None or folder != self._folder:
            return Tokenizer.from_folder(folder)
        return self._tokenizer

    def _read(self) -> None:
        with suppress(MaitredError, OSError):  # told by whoever asks for it
            self._tokenizer = Tokenizer.from_folder(self._folder)


def served_model(facts: ModelFacts, read: Callable[[Path], Tokenizer] = Tokenizer.from_folder) -> ServedModel:
    """Reads the tokenizer; the weights stay where they are."""
    folder = Path(facts.tokenizer_folder)
    template = facts.chat_template
    return ServedModel(
        names=facts.names,
        tokenizer=read(folder),
        chat_template=ChatTemplate(template, read_named_tokens(folder)) if template is not None else None,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        generation_defaults=facts.generation_defaults,
        created=facts.created,
        root=facts.root,
        revision=facts.revision,
        block_size=facts.block_size,
        footprint=facts.footprint,
    )
