"""A replica that answers from a function, a tokenizer of bytes, and a real server around them on a free port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import eq
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from maitred.api.http.routes import RouteTable
from maitred.api.http.server import HttpServer
from maitred.api.serving import create_app
from maitred.config import ServerConfig
from maitred.core.clock import Clock
from maitred.core.errors import EngineDead, RouteNotFound
from maitred.core.replica import ReplicaState
from maitred.core.request import Charges, FinishReason, RequestSpec
from maitred.core.step import RequestProgress, RequestTiming, TokenLogprobs
from maitred.engine.intake import ServedModel
from maitred.engine.live_view import LiveView
from maitred.engine.replica import Replica
from maitred.gate.admission import AdmissionController
from maitred.storage.capture import Capture
from maitred.storage.key_files import TenantFile, make_key
from maitred.storage.ledger import Ledger
from maitred.tenancy.tenant import TenantTable, read_tenants
from maitred.text.chat_template import ChatTemplate
from maitred.text.parts import TextParts
from maitred.text.tokenizer import Tokenizer, byte_alphabet
from tests.waiting import HANGS_S, joined

EOS = 256
NO_TIME = RequestTiming(queue_s=0.0, prefill_s=0.0, decode_s=0.0)  # its steps take none
TEMPLATE = (
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor -%}"
    "{%- if add_generation_prompt %}<assistant>{% if loud %}!{% endif %}{% endif -%}"
)


def byte_tokenizer() -> Tokenizer:
    """Token id = byte value; 256 is end-of-sequence."""
    inner = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(byte_alphabet())}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return Tokenizer(inner, {"eos_token": "</s>"})


def table_of(tenants: dict[str, dict[str, Any]]) -> TenantTable:
    """Every tenant's key is its name; that of `boss` is an administrator's."""
    whole = {}
    for name, fields in tenants.items():
        made = make_key(name, secret=name, admin=name == "boss").key
        entry = {"id": f"key_{name}", "sha256": made.digest.hex(), "admin": made.admin}
        whole[name] = {**fields, "keys": [entry]}
    return read_tenants({"tenants": whole}, "tenants.yaml")


def make_model(*, tokenizer: Tokenizer | None = None, chat_template: Any = TEMPLATE, **fields: Any) -> ServedModel:
    tokenizer = tokenizer or byte_tokenizer()
    if isinstance(chat_template, str):
        chat_template = ChatTemplate(chat_template, added_tokens=tokenizer.added_tokens)
    model = ServedModel(
        names=("tiny", "tiny-alias"),
        text=TextParts(tokenizer, chat_template),
        max_model_len=512,
        vocab_size=257,
        eos_token_ids=(EOS,),
        created=1_700_000_000,
        root="models/tiny",
    )
    return replace(model, **fields)


def says(text: str) -> Callable[[RequestSpec], Sequence[int]]:
    """An answer that ends by itself."""
    return lambda request: [*text.encode(), EOS]


@dataclass
class FakeReplica(Replica):
    """Gives each request the tokens of `answer`, one per turn of the loop (or per `token_s`), and notes aborts."""

    answer: Callable[[RequestSpec], Sequence[int]] = field(default_factory=lambda: says("Hello, world!"))
    token_s: float = 0.0
    tokens_per_item: int = 1
    fail_after: int | None = None  # tokens, then the logits are NaN
    die_after: int | None = None  # tokens, then the engine is dead
    queued: bool = False  # nothing is ever scheduled
    held: bool = False  # nothing more comes until it is not
    num_cached_tokens: int = 0
    dead: str | None = None
    submitted: list[RequestSpec] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    live: dict[str, asyncio.Event] = field(default_factory=dict)

    def submit(self, *samples: RequestSpec) -> list[AsyncIterator[RequestProgress]]:
        self.submitted += samples
        self.live |= {request.request_id: asyncio.Event() for request in samples}
        return [self._progress(request) for request in samples]

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if request_id in self.live:
            if reason is FinishReason.ABORT:
                self.aborted.append(request_id)
            self.live.pop(request_id).set()

    def state(self) -> ReplicaState:
        running = 0 if self.queued else len(self.live)
        return ReplicaState(
            alive=self.dead is None,
            error=self.dead,
            num_running=running,
            num_waiting=len(self.live) - running,
            num_blocks=100,
            num_blocks_used=2 * running,
            num_blocks_cached=7,
            num_finished={FinishReason.STOP: 3},
        )

    async def live_view(self) -> LiveView:
        raise RouteNotFound("as of a server that has no such page")

    async def _progress(self, request: RequestSpec) -> AsyncIterator[RequestProgress]:
        if self.dead is not None:
            raise EngineDead(self.dead)
        ended = self.live[request.request_id]
        tokens = list(self.answer(request))
        finish = FinishReason.STOP if len(tokens) <= request.max_tokens else FinishReason.LENGTH
        tokens = tokens[: request.max_tokens]
        charges = Charges(
            num_prompt_tokens=request.num_prompt_tokens if request.sample_index == 0 else 0,
            num_cached_tokens=self.num_cached_tokens,
            first_scheduled_at=request.arrived_at,
            first_token_at=request.arrived_at,
            num_draft_tokens=len(request.prediction_token_ids),  # each of its tokens is tried, where it would stand
            num_accepted_tokens=sum(map(eq, request.prediction_token_ids, tokens)),
        )
        for start in range(0, len(tokens), self.tokens_per_item):
            await self._turn(ended)
            if ended.is_set():
                charges = charges._replace(num_generated_tokens=start)
                yield RequestProgress(
                    request.request_id, finish_reason=FinishReason.ABORT, charges=charges, timing=NO_TIME
                )
                return
            if self.fail_after is not None and start >= self.fail_after:
                self.live.pop(request.request_id, None)
                yield RequestProgress(request.request_id, finish_reason=FinishReason.ERROR, error="logits are NaN")
                return
            if self.die_after is not None and start >= self.die_after:
                raise EngineDead("the engine stopped: out of memory")
            end = start + self.tokens_per_item
            last = end >= len(tokens)
            if last:
                self.live.pop(request.request_id, None)
            yield RequestProgress(
                request.request_id,
                tuple(tokens[start:end]),
                logprobs=_logprobs(tokens[start:end], request.sampling.logprobs),
                prompt_logprobs=_prompt_logprobs(request) if start == 0 else None,
                finish_reason=finish if last else None,
                charges=charges._replace(num_generated_tokens=min(end, len(tokens))) if start == 0 or last else None,
                timing=NO_TIME if last else None,
            )

    async def _turn(self, ended: asyncio.Event) -> None:
        while self.held and not ended.is_set():  # noqa: ASYNC110  # set by the test, in another thread
            await asyncio.sleep(0.002)
        if not self.queued and self.token_s == 0.0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(None if self.queued else self.token_s):
                await ended.wait()
        except TimeoutError:
            pass


def _logprobs(tokens: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
    if num_top is None:
        return None
    return tuple(_at(token, num_top) for token in tokens)


def _prompt_logprobs(request: RequestSpec) -> tuple[TokenLogprobs, ...] | None:
    num_top = request.sampling.prompt_logprobs
    if num_top is None or request.sample_index > 0:
        return None
    return tuple(_at(token, num_top) for token in request.prompt_token_ids[1:])


def _at(token: int, num_top: int) -> TokenLogprobs:
    """The chosen token is the second best; the best is the letter Z."""
    top = (ord("Z"), token, *range(num_top))[:num_top]
    values = (-0.5, -1.5, *(float("-inf") for _ in range(num_top)))[:num_top]
    return TokenLogprobs((token, *top), (-1.5, *values), (2, *range(1, num_top + 1)))


@dataclass
class RunningServer:
    url: str
    port: int
    replica: FakeReplica
    server: HttpServer


@dataclass
class FakeTenants:
    """A TenantFile whose table is whatever a test puts there."""

    table: TenantTable
    num_failures: int = 0


@contextmanager
def running_server(
    replica: Any = None,
    model: ServedModel | None = None,
    *,
    is_ready: Callable[[], bool] = lambda: True,
    admission: AdmissionController | None = None,
    tenants: TenantFile | None = None,
    ledger: Ledger | None = None,
    capture: Capture | None = None,
    clock: Clock | None = None,
    policy: str | None = None,
    routes: RouteTable | None = None,
    **config: Any,
) -> Iterator[RunningServer]:
    """uvicorn on a free loopback port, in a thread; the block ends with a graceful stop."""
    replica = replica if replica is not None else FakeReplica()
    settings = ServerConfig(port=0, **config)
    app = create_app(
        replica,
        model or make_model(),
        settings,
        is_ready=is_ready,
        admission=admission,
        tenants=tenants,
        ledger=ledger,
        capture=capture,
        clock=clock,
        policy=policy,
        routes=routes,
    )
    listening = threading.Event()
    where: list[int] = []

    def on_listening(host: str, port: int) -> None:
        where.append(port)
        listening.set()

    server = HttpServer(app, settings, on_open=on_listening)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert listening.wait(HANGS_S), "the server did not start"
    try:
        yield RunningServer(f"http://127.0.0.1:{where[0]}", where[0], replica, server)
    finally:
        server.should_exit = True
        joined(thread)
