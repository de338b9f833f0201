"""A streamed completion beside a test that does something to its server meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import httpx

from tests.waiting import HANGS_S, joined


class Stream:
    """Read in a thread: the text of each choice, how it finished, errors, and whether the end came."""

    def __init__(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        self.texts: dict[int, str] = {}
        self.finishes: dict[int, str] = {}
        self.errors: list[dict[str, Any]] = []
        self.usage: dict[str, Any] = {}
        self.num_chunks, self.whole = 0, False
        self._asked = {"url": f"{url}/v1/completions", "json": {**body, "stream": True}, "headers": headers}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    def _run(self) -> None:
        with httpx.stream("POST", **self._asked, timeout=HANGS_S) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.whole = True
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                self.finishes[choice["index"]] = choice["finish_reason"]
        self.num_chunks += 1

    def join(self) -> None:
        joined(self._thread)

    def end(self) -> dict[int, str]:
        """Its texts, when it has come to its end without an error."""
        self.join()
        assert not self.errors
        return self.texts
