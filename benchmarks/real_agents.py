"""Claude Code and Codex themselves against a server: what each turn of a session finds in the prefix cache.

    npm install @anthropic-ai/claude-code @openai/codex
    .venv/bin/python benchmarks/real_agents.py --bin node_modules/.bin

A relay between client and server puts each request to the server as the client wrote it, but for a single token and no
stream, and tells the client instead that the model called a tool, so that a session goes on whatever the model is able
to. Prompts, headers, tools and their results are the client's own. Each session has a home of its own and reads files
of a folder that is made for it; nothing is asked of any other machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from harness import served

TASK = "Look at the files of this folder, one by one."
SAID = "I look at the next file."
NUM_FILES = 4
FILE = "".join(f"def step_{number}(value): return value + {number}\n" for number in range(5))
CODEX = """model = "{model}"
model_provider = "maitred"
[model_providers.maitred]
name = "maitred"
base_url = "{url}/v1"
wire_api = "responses"
"""


def events(kinds: list[dict[str, Any]]) -> bytes:
    return "".join(
        f"event: {each['type']}\ndata: {json.dumps(each | {'sequence_number': number})}\n\n"
        for number, each in enumerate(kinds)
    ).encode()


def of_claude(turn: int, folder: Path, last: bool) -> bytes:
    """A message with a call of Read as the API streams it; without one where it is the last."""
    message = {"id": f"msg_{turn}", "type": "message", "role": "assistant", "model": "m", "content": []}
    blocks: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"type": "text", "text": ""}, {"type": "text_delta", "text": SAID})
    ]
    if not last:
        path = json.dumps({"file_path": str(folder / f"step_{turn % NUM_FILES}.py"), "limit": 2 + turn // NUM_FILES})
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Read", "input": {}}
        blocks.append((call, {"type": "input_json_delta", "partial_json": path}))
    told: list[dict[str, Any]] = [
        {"type": "message_start", "message": message | {"usage": {"input_tokens": 1, "output_tokens": 1}}}
    ]
    for index, (block, delta) in enumerate(blocks):
        told += [
            {"type": "content_block_start", "index": index, "content_block": block},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    reason = {"stop_reason": "end_turn" if last else "tool_use", "stop_sequence": None}
    return events(
        [*told, {"type": "message_delta", "delta": reason, "usage": {"output_tokens": 9}}, {"type": "message_stop"}]
    )


def of_codex(turn: int, folder: Path, last: bool) -> bytes:
    """A response with a call of its shell; without one where it is the last."""
    said = {"type": "output_text", "text": SAID, "annotations": []}
    items: list[dict[str, Any]] = [
        {"id": f"msg_{turn}", "type": "message", "role": "assistant", "status": "completed", "content": [said]}
    ]
    if not last:
        command = json.dumps({"cmd": f"head -n {2 + turn // NUM_FILES} step_{turn % NUM_FILES}.py"})
        call = {"type": "function_call", "call_id": f"call_{turn}", "name": "exec_command", "arguments": command}
        items.append({"id": f"fc_{turn}", "status": "completed"} | call)
    response = {"id": f"resp_{turn}", "object": "response", "created_at": 1, "model": "m", "output": []}
    told: list[dict[str, Any]] = [{"type": "response.created", "response": response | {"status": "in_progress"}}]
    for index, item in enumerate(items):
        told += [
            {"type": f"response.output_item.{what}", "output_index": index, "item": item} for what in ("added", "done")
        ]
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    done = response | {"status": "completed", "output": items, "usage": usage}
    return events([*told, {"type": "response.completed", "response": done}])


class Relay(ThreadingHTTPServer):
    """Proxy that asks the server each turn, keeps the prompt's figures, and answers the client by `write`."""

    daemon_threads = True

    def __init__(self, server_url: str, path: str, most: str, write: Any, folder: Path, num_turns: int) -> None:
        super().__init__(("127.0.0.1", 0), Relayed)
        self.upstream = urlsplit(server_url).netloc
        self.path, self.most, self.write, self.folder, self.num_turns = path, most, write, folder, num_turns
        self.turns: list[tuple[int, int]] = []  # of each: prompt tokens, those of them cached
        self.refused: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Relayed(BaseHTTPRequestHandler):
    server: Relay
    protocol_version = "HTTP/1.1"

    def ask(self) -> None:
        """Relay one request; a turn's answer is replaced by the scripted one."""
        relay = self.server
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        is_turn = self.path.split("?")[0] == relay.path
        if is_turn:
            body = json.dumps(json.loads(body) | {"stream": False, relay.most: 16}).encode()
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in ("host", "connection", "accept-encoding", "content-length")
        }
        connection = http.client.HTTPConnection(relay.upstream, timeout=600)
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        status, told, kind = answer.status, answer.read(), answer.getheader("content-type") or "text/plain"
        if status >= 400:
            relay.refused.append(f"{self.command} {self.path}: {status} {told[:300]!r}")
        elif is_turn:
            relay.turns.append(prompt_of(json.loads(told)["usage"]))
            turn = len(relay.turns)
            told, kind = relay.write(turn, relay.folder, turn >= relay.num_turns), "text/event-stream"
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    do_GET = do_POST = do_HEAD = ask  # noqa: N815

    def log_message(self, *_: object) -> None:
        return


def prompt_of(usage: dict[str, Any]) -> tuple[int, int]:
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def run_claude(bin_folder: Path, url: str, model: str, home: Path) -> subprocess.CompletedProcess[str]:
    words = ["-p", "--model", model, "--tools", "Read,Bash", "--allowedTools", "Read,Bash"]
    names = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return run(bin_folder / "claude", words, home, names)


def run_codex(bin_folder: Path, url: str, model: str, home: Path) -> subprocess.CompletedProcess[str]:
    (home / "config.toml").write_text(CODEX.format(model=model, url=url))
    words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"]
    return run(bin_folder / "codex", words, home, {"CODEX_HOME": str(home)})


def run(program: Path, words: list[str], home: Path, names: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(home), **names}
    return subprocess.run(
        [str(program.absolute()), *words],
        input=TASK, cwd=home / "work", env=env, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip


AGENTS: dict[str, tuple[Any, str, str, Any]] = {
    "claude": (run_claude, "/v1/messages", "max_tokens", of_claude),
    "codex": (run_codex, "/v1/responses", "max_output_tokens", of_codex),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="the folder with `claude` and `codex`")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--turns", type=int, default=10, help="SmolLM2 has room for 11 of Codex, 20 of Claude Code")
    parser.add_argument("--agents", nargs="*", default=[*AGENTS], choices=[*AGENTS])
    options = parser.parse_args()
    print(f"{'agent':<8} {'turns':>5} {'first prompt':>12} {'last':>6} {'found of the turn before':>24} {'cached':>7}")
    for name in options.agents:
        start, path, most, write = AGENTS[name]
        with served(options.model) as server, TemporaryDirectory() as home:
            work = Path(home) / "work"
            work.mkdir()
            for number in range(NUM_FILES):
                (work / f"step_{number}.py").write_text(FILE)
            relay = Relay(server.url, path, most, write, work, options.turns)
            threading.Thread(target=relay.serve_forever, daemon=True).start()
            ran = start(options.bin, relay.url, options.model, Path(home))
            relay.shutdown()
        if len(relay.turns) < options.turns or relay.refused or ran.returncode:
            said = f"{relay.refused} {ran.stdout[-600:]} {ran.stderr[-600:]}"
            raise SystemExit(f"{name} ended with {ran.returncode} after {len(relay.turns)} turns: {said}")
        known = sum(cached for _, cached in relay.turns[1:])
        before, now = (sum(prompt for prompt, _ in turns) for turns in (relay.turns[:-1], relay.turns[1:]))
        first, last = relay.turns[0][0], relay.turns[-1][0]
        print(f"{name:<8} {len(relay.turns):>5} {first:>12,} {last:>6,} {known / before:>24.1%} {known / now:>7.1%}")


if __name__ == "__main__":
    main()
