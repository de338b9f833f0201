"""A closed loop over HTTP against an OpenAI-compatible server: token ids in, a stream out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import aiohttp

from peers.worker import Prompt, loop_figures

Done = tuple[float, list[float]]


def run_http_loop(url: str, model: str, prompts: Sequence[Prompt], clients: int, num_tokens: int) -> dict[str, float]:
    """Every prompt once, `clients` of them in flight; the same figures as `run_closed_loop`."""
    return asyncio.run(_run(url, model, prompts, clients, num_tokens))


async def _run(url: str, model: str, prompts: Sequence[Prompt], clients: int, num_tokens: int) -> dict[str, float]:
    waiting, done = list(prompts), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def client() -> None:
            while waiting:
                done.append(await _ask(session, url, model, waiting.pop(), num_tokens))

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return loop_figures(done, time.perf_counter() - began)


async def _ask(session: aiohttp.ClientSession, url: str, model: str, prompt: Prompt, num_tokens: int) -> Done:
    """When it was sent and when each token came. Raises RuntimeError when the answer is not whole."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    sent, times = time.perf_counter(), []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or {}
                times += [time.perf_counter()] * (usage.get("completion_tokens", 0) - len(times))
    if len(times) != num_tokens:
        raise RuntimeError(f"asked for {num_tokens} tokens, got {len(times)}")
    return sent, times
