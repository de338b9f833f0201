"""Text files of a model folder, and their like in a GGUF file, that can be read without the tokenizer or Jinja."""

from __future__ import annotations

import filecmp
import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Required, TypedDict

import msgspec

from maitred.core.errors import CheckpointError
from maitred.model.gguf_file import is_gguf

_CONFIG = "tokenizer_config.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GGUF_AGAIN = "the file is damaged, download it again"

_GGUF_NAMES = {"unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding"}  # the format's own spelling
_GGUF_TEMPLATE = "tokenizer.chat_template"
_SENTENCEPIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # of files that do not name theirs


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one when there is no such file. Raises CheckpointError when it is broken."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is no file; copy it again from where the model came from")
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy it again from where the model came from") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


@contextmanager
def gguf_metadata(file: Path) -> Iterator[Mapping[str, Any]]:
    """A GGUF file's keys and values, while it is open; CheckpointErrors about them then name the file."""
    from maitred.model.gguf_file import GgufFile  # noqa: PLC0415

    opened = GgufFile(file)
    try:
        yield opened.metadata
    except CheckpointError as error:
        raise error if str(file) in str(error) else CheckpointError(f"{file}: {error}") from None
    finally:
        opened.close()


def gguf_key_of(name: str) -> str:
    """The key of bos_token, eos_token ..."""
    return f"tokenizer.ggml.{_GGUF_NAMES.get(name, name.removesuffix('_token'))}_token_id"


def gguf_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """bos_token, eos_token, eot_token ... -> id. Raises CheckpointError for what is no number."""
    found = dict(_SENTENCEPIECE_IDS) if metadata.get("tokenizer.ggml.model") == "llama" else {}
    for name in (*NAMED_TOKENS, "eot_token"):
        if (key := gguf_key_of(name)) in metadata:
            found[name] = metadata[key]
            if not isinstance(found[name], int):
                raise CheckpointError(f"key {key} is {found[name]!r}, and no token id; {GGUF_AGAIN}")
    return found


def gguf_named_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """`read_named_tokens` of a file that is open. Raises CheckpointError for ids that no token has."""
    found = gguf_token_ids(metadata)
    for name, number in found.items():
        if not 0 <= number < len(tokens):
            raise CheckpointError(f"{name} has id {number:,}, and the vocabulary {len(tokens):,} tokens; {GGUF_AGAIN}")
    return {name: tokens[number] for name, number in found.items() if name in NAMED_TOKENS}


def read_named_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token ... -> text, as transformers reads them: tokenizer_config.json before the older map; or as
    a GGUF file has them."""
    if folder.is_file():
        with gguf_metadata(folder) as metadata:
            return gguf_named_tokens(metadata, metadata.get("tokenizer.ggml.tokens", []))
    found: dict[str, str] = {}
    for path in (folder / "special_tokens_map.json", folder / _CONFIG):
        config = read_json(path)
        for name in NAMED_TOKENS:
            token = _field(path, config, name, str | AddedTokenFields | None)
            if token is not None:
                found[name] = token if isinstance(token, str) else token["content"]
    return found


class AddedTokenFields(TypedDict, total=False):
    """An added token as tokenizer_config.json describes one."""

    content: Required[str]
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


def read_configured_tokens(folder: Path) -> list[AddedTokenFields]:
    """`added_tokens_decoder` of tokenizer_config.json, in id order. Raises CheckpointError."""
    path = folder / _CONFIG
    found = _field(path, read_json(path), "added_tokens_decoder", dict[int, AddedTokenFields] | None) or {}
    return [token for _, token in sorted(found.items())]


def _field(path: Path, config: dict[str, Any], name: str, kind: Any) -> Any:
    """Raises CheckpointError, which names file and field, where the field is of another kind."""
    try:
        return msgspec.convert(config.get(name), kind, str_keys=True)
    except msgspec.ValidationError as error:
        told = str(error).replace("`$", f"`{name}")
        raise CheckpointError(f"{path}: {name}: {told}; copy it again from where the model came from") from None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def read_chat_template(folder: Path) -> str | dict[str, str] | None:
    """The text of the model's template, those of several by name, or None.

    chat_template.jinja, which is `default`, and additional_chat_templates/NAME.jinja go before `chat_template` in
    tokenizer_config.json (a string, or a list of named ones), and that before the older chat_template.json. A GGUF
    file has keys for them.
    """
    if folder.is_file():
        with gguf_metadata(folder) as metadata:
            found: Any = {
                key[len(_GGUF_TEMPLATE) + 1 :] or "default": metadata[key]
                for key in metadata
                if key == _GGUF_TEMPLATE or key.startswith(f"{_GGUF_TEMPLATE}.")
            }
        return found["default"] if found.keys() == {"default"} else found or None
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja", **{path.stem: path for path in more}}
    found = {name: _text_of(path) for name, path in files.items() if path.is_file()}
    for path in (folder / _CONFIG, folder / "chat_template.json"):
        if not found:
            found = _field(path, read_json(path), "chat_template", str | list[_NamedTemplate] | None)
            found = {each.name: each.template for each in found} if isinstance(found, list) else found
    return found["default"] if isinstance(found, dict) and found.keys() == {"default"} else found or None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


class AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[AddedToken] | None = None


def added_token_id(tokenizer_file: Path, text: str) -> int | None:
    """The id of a token that tokenizer.json adds to its vocabulary, or None; a fiftieth of reading all of the file."""
    try:
        found = msgspec.json.decode(tokenizer_file.read_bytes(), type=_TokenizerFile).added_tokens or []
    except (OSError, msgspec.DecodeError):
        return None  # the full reader names the fault
    return next((token.id for token in found if token.content == text), None)


class _VocabularyModel(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _VocabularyFile(msgspec.Struct):
    model: _VocabularyModel
    added_tokens: list[AddedToken] = []


def vocabulary_difference(tokenizer_file: Path, other_file: Path) -> str | None:
    """Return the first difference of two vocabularies, in words; None where each id that both know is one token.

    Raises CheckpointError for a file that is no tokenizer.
    """
    if filecmp.cmp(tokenizer_file, other_file, shallow=False):
        return None
    tokens, other_tokens = _tokens_of(tokenizer_file), _tokens_of(other_file)
    differing = sorted(i for i in tokens.keys() & other_tokens.keys() if tokens[i] != other_tokens[i])
    if not differing:
        return None
    first = differing[0]
    return (
        f"of its {len(tokens):,} token ids and the other's {len(other_tokens):,}, {len(differing):,} are other tokens, "
        f"as {first} is: {tokens[first]!r} and {other_tokens[first]!r}"
    )


def _tokens_of(path: Path) -> dict[int, str]:
    if is_gguf(path):
        with gguf_metadata(path) as metadata:
            return dict(enumerate(metadata.get("tokenizer.ggml.tokens", [])))
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_VocabularyFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
    vocab = file.model.vocab
    listed = enumerate(piece for piece, _ in vocab) if isinstance(vocab, list) else ((i, t) for t, i in vocab.items())
    return dict(listed) | {token.id: token.content for token in file.added_tokens}
