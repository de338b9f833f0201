"""The served model, as the engine tells it: facts, and the folder or GGUF file from which the text parts are read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from maitred.core.errors import MaitredError
from maitred.engine.intake import ServedModel
from maitred.engine.model_facts import ModelFacts
from maitred.model.checkpoint import local_path
from maitred.model.packaged import default_model
from maitred.text.parts import FolderText
from maitred.text.tokenizer import Tokenizer


class TextAhead:
    """Reads the tokenizer in a thread of its own while the engine's process loads the weights."""

    def __init__(self, model: str | None) -> None:
        """`model` as in ModelConfig; a hub id is not read ahead, for it may have to be downloaded first."""
        self._model = model
        self._place: Path | None = None
        self._tokenizer: Tokenizer | None = None
        self._thread = threading.Thread(target=self._read, name="maitred-text", daemon=True)
        self._thread.start()

    def tokenizer(self, folder: Path) -> Tokenizer:
        """Tokenizer of this folder or GGUF file, read ahead or now."""
        self._thread.join()
        if self._tokenizer is None or folder != self._place:
            return Tokenizer.from_folder(folder)
        return self._tokenizer

    def _read(self) -> None:
        with suppress(MaitredError, OSError):  # told by the code that needs it
            self._place = local_path(self._model or default_model())
            if self._place is not None:
                self._tokenizer = Tokenizer.from_folder(self._place)


def served_model(facts: ModelFacts, read_tokenizer: Callable[[Path], Tokenizer] | None = None) -> ServedModel:
    """A served model, whose text is read when it is first asked for; the weights stay where they are."""
    return ServedModel(
        names=facts.names,
        text=FolderText(
            Path(facts.tokenizer_folder),
            facts.chat_template,
            read_tokenizer,
            allow_special_tokens_in_content=facts.allow_special_tokens_in_content,
            tool_format=facts.tool_format,
            num_rows=facts.vocab_size,
        ),
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        generation_defaults=facts.generation_defaults,
        created=facts.created,
        root=facts.root,
        revision=facts.revision,
        block_size=facts.block_size,
        max_num_seqs=facts.max_num_seqs,
        footprint=facts.footprint,
    )


def warning_of(model: ServedModel) -> str | None:
    """Warning at the start about tokens that the model cannot read."""
    if not (missing := model.tokenizer.without_row):
        return None
    named = ", ".join(map(repr, list(missing.values())[:4]))
    told = f"{len(missing):,} tokens of the tokenizer have no row in the model's embedding of {model.vocab_size:,} rows"
    return f"{told}, {named} among them; a text that holds one is refused"
