"""Text at the edges: tokens to text and back, chat templates, stop strings. The engine in between sees neither."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maitred.text.chat_template import ChatTemplate
    from maitred.text.detokenizer import Detokenizer
    from maitred.text.parts import FolderText, Text, TextParts
    from maitred.text.stop_strings import StopResult, StopStringMatcher
    from maitred.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "FolderText",
    "StopResult",
    "StopStringMatcher",
    "Text",
    "TextParts",
    "Tokenizer",
]

_MODULE_OF = {
    "ChatTemplate": "chat_template",
    "Detokenizer": "detokenizer",
    "FolderText": "parts",
    "StopResult": "stop_strings",
    "StopStringMatcher": "stop_strings",
    "Text": "parts",
    "TextParts": "parts",
    "Tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
