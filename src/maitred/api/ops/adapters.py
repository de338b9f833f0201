"""LoRA adapters loaded and unloaded while the server runs, by vLLM's two routes, with its answers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from maitred.api.http.app import App
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.engine.adapter_book import AdapterBook
from maitred.engine.queries import AdapterFolder
from maitred.errors import CheckpointError, ConfigError, InvalidRequest, KernelError, ModelNotFound

LOADING = "load and unload adapters"  # what it takes an administrator for
MAX_NAME = 128


class LoadAdapter(msgspec.Struct, frozen=True):
    """`lora_path` is relative to --lora-dir. A name that is there already stands for the new files from then on."""

    lora_name: str
    lora_path: str


class UnloadAdapter(msgspec.Struct, frozen=True):
    lora_name: str


_LOAD, _UNLOAD = msgspec.json.Decoder(LoadAdapter), msgspec.json.Decoder(UnloadAdapter)


async def load(app: App, exchange: Exchange) -> None:
    """Answers when the folder was read and checked; requests may name it from then on."""
    asked = await exchange.json(_LOAD)
    book = _book(app)
    folder = _folder(app, asked, book.folder or "")
    async with app.in_flight.watch(exchange):
        try:
            await book.load(folder)
        except (CheckpointError, ConfigError, KernelError) as error:
            raise InvalidRequest(f"adapter {asked.lora_name}: {error}", param="lora_path") from None
    await _say(exchange, f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


async def unload(app: App, exchange: Exchange) -> None:
    """At once for new requests; answers when those that have it are done."""
    asked = await exchange.json(_UNLOAD)
    book = _book(app)
    if asked.lora_name not in book.named:
        raise ModelNotFound(f"the adapter {shortened(repr(asked.lora_name))} is not loaded", param="lora_name")
    async with app.in_flight.watch(exchange):
        await book.unload(asked.lora_name)
    await _say(exchange, f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


async def _say(exchange: Exchange, text: str) -> None:
    await exchange.answer(text.encode(), 200, ((b"content-type", b"text/plain; charset=utf-8"),))


def _book(app: App) -> AdapterBook:
    if app.adapters is None or app.adapters.folder is None:
        raise InvalidRequest("adapters are loaded and unloaded only where the server was started with --lora-dir DIR")
    return app.adapters


def _folder(app: App, asked: LoadAdapter, allowed: str) -> AdapterFolder:
    """Raises InvalidRequest for a name that no adapter may have, and for a path out of --lora-dir."""
    name, path = asked.lora_name, asked.lora_path
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or name != name.strip() or "@" in name:
        raise InvalidRequest(
            f"lora_name is {shortened(repr(name))}; it has 1 to {MAX_NAME} printable characters, none of them @, and "
            "no space around it",
            param="lora_name",
        )
    if app.is_model(name):
        raise InvalidRequest(f"{name!r} is a name of the model itself; choose another", param="lora_name")
    root = Path(allowed).resolve()
    try:
        folder = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        folder = root.parent
    if Path(path).is_absolute() or folder == root or not folder.is_relative_to(root):
        raise InvalidRequest(
            f"lora_path is {shortened(repr(path))}; it must be a folder inside --lora-dir, relative to it, wherever "
            "links lead",
            param="lora_path",
        )
    return AdapterFolder(name, str(folder), str(root))
