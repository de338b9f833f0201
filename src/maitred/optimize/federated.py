"""Federated LoRA: clients train adapters where their data is, and a server averages what they learnt, round by round.

FedAvg (McMahan et al. 2017, arXiv:1602.05629) with A frozen from the seed, so that the mean of B is the mean update
(FFA-LoRA, Sun et al. 2024, arXiv:2403.12313). Updates leave a client as safetensors, clipped; documents never do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import uvicorn
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor, nn

from maitred.api.http.auth import Authenticator
from maitred.config.optimize import FederateConfig, JoinConfig
from maitred.core.errors import ConfigError, InvalidApiKey
from maitred.model.checkpoint import Checkpoint, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.torch_decoder import TorchDecoder, load_torch_decoder
from maitred.optimize.calibrate import save_whole
from maitred.optimize.data import Document, Progress, Reader, parted
from maitred.optimize.finetune import BATCH_TOKENS, LORA_LR, attach_lora, save_adapter
from maitred.optimize.job import Job, Tool
from maitred.optimize.trainer import ADAMW_LR, Budget, batch_of, batches_of, reading, train
from maitred.storage.key_files import TenantFile

DELTA = 1e-5  # of the epsilon that is told
SLACK = 1.05  # norm of an update over the clip: clients clip, and then round to bfloat16
MAX_EXAMPLES = 10**7
HEADER_BYTES = 2**18
PARTING_S, POLL_S, PATIENCE_S = 10.0, 0.5, 120.0

Matrices = dict[str, tuple[nn.Parameter, nn.Parameter]]  # (A, B) by linear


class UpdateRefused(Exception):
    """An update that is not averaged: `kind` is counted."""

    def __init__(self, kind: str, status: int, words: str) -> None:
        super().__init__(words)
        self.kind, self.status = kind, status


@dataclass(slots=True)
class Federation:
    """B and the round, as the server keeps them. An accepted update is on disk before its client hears of it."""

    own: FederateConfig
    b: dict[str, Tensor]
    state: Path
    round: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    history: list[dict[str, Any]] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)  # clients that train in this round
    behind: set[str] = field(default_factory=set)  # clients of the round before that have not fetched B since
    updates: dict[str, tuple[int, dict[str, Tensor]]] = field(default_factory=dict)
    """Examples and change of B, by client, of this round."""

    def __post_init__(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        kept = self.state / "federation.safetensors"
        if kept.is_file():
            with safe_open(kept, "pt") as opened:
                self.b = {name: opened.get_tensor(name) for name in self.b}
                known = json.loads(opened.metadata()["federation"])
            self.round, self.history, self.refused = known["round"], known["history"], Counter(known["refused"])
        for file in self.state.glob(f"{self.round}.*.update"):
            with safe_open(file, "pt") as opened:
                told = json.loads(opened.metadata()["update"])
                self.updates[told["client"]] = (told["examples"], {name: opened.get_tensor(name) for name in self.b})

    @property
    def is_done(self) -> bool:
        return self.round >= self.own.rounds

    @property
    def body_bytes(self) -> int:
        return 2 * sum(b.numel() for b in self.b.values())

    def offer(self, client: str) -> bytes:
        """B as a client begins with it."""
        if self.is_done:
            self.behind.discard(client)
        else:
            self.fetched.add(client)
        return _body(self.b)

    def take(self, client: str, round_number: int, examples: int, body: bytes) -> None:
        """Raises UpdateRefused."""
        if round_number != self.round or self.is_done:
            raise UpdateRefused("late", 409, f"round {round_number} is over; the federation is at {self.round}")
        if client in self.updates:
            raise UpdateRefused("repeated", 409, f"{client} has told its update of round {round_number} already")
        if not 1 <= examples <= MAX_EXAMPLES:
            raise UpdateRefused("malformed", 400, f"{examples} examples; tell 1 to {MAX_EXAMPLES}")
        update = self._checked(body)
        told = {"update": json.dumps({"client": client, "examples": examples})}
        save_whole(update, self.state / f"{self.round}.{_digest(client.encode())}.update", told)
        self.updates[client] = (examples, update)

    def _checked(self, body: bytes) -> dict[str, Tensor]:
        try:
            update = load(body)
        except (SafetensorError, ValueError, KeyError) as error:
            raise UpdateRefused("malformed", 400, f"the body is no safetensors file ({error})") from None
        shapes = {name: tuple(b.shape) for name, b in self.b.items()}
        if {name: tuple(each.shape) for name, each in update.items()} != shapes:
            raise UpdateRefused("wrong_shape", 400, f"the update has other tensors than the adapter's {len(shapes)} B")
        update = {name: each.float() for name, each in update.items()}
        if not math.isfinite(norm := norm_of(update)):
            raise UpdateRefused("not_finite", 400, "the update has values that are no finite numbers")
        if norm > SLACK * self.own.clip:
            raise UpdateRefused("huge", 400, f"the update's norm is {norm:.4g}; clip it to {self.own.clip:g}")
        return update

    @property
    def has_all(self) -> bool:
        """Whether every client that began the round has told its update, and they are enough."""
        return len(self.updates) >= self.own.min_clients and self.fetched <= self.updates.keys()

    def close_round(self, noise: torch.Generator) -> None:
        """Average the updates, by examples; with noise each counts as much, so that one changes the sum by the clip."""
        assert len(self.updates) >= self.own.min_clients
        weights = {client: 1 if self.own.noise else examples for client, (examples, _) in self.updates.items()}
        total = sum(weights.values())
        for client, (_, update) in self.updates.items():
            for name, each in _clipped(update, self.own.clip).items():
                self.b[name] = self.b[name] + weights[client] / total * each
        if self.own.noise:
            std = self.own.noise * self.own.clip / total
            self.b = {name: b + torch.empty_like(b).normal_(0, std, generator=noise) for name, b in self.b.items()}
        examples = sum(count for count, _ in self.updates.values())
        norm = max(norm_of(update) for _, update in self.updates.values())
        shown = {
            "round": self.round,
            "clients": len(self.updates),
            "examples": examples,
            "largest_norm": round(norm, 4),
        }
        self.history.append(shown)
        self.round += 1
        known = {"round": self.round, "history": self.history, "refused": self.refused}
        save_whole(self.b, self.state / "federation.safetensors", {"federation": json.dumps(known)})
        self.behind, self.fetched, self.updates = self.fetched | self.updates.keys(), set(), {}
        for file in self.state.glob("*.update"):
            file.unlink()


def norm_of(update: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in update.values()))


def _clipped(update: Mapping[str, Tensor], clip: float) -> dict[str, Tensor]:
    share = min(1.0, clip / max(norm_of(update), 1e-30))
    return {name: each * share for name, each in update.items()}


def _body(tensors: Mapping[str, Tensor]) -> bytes:
    return bytes(save({name: each.to(torch.bfloat16) for name, each in tensors.items()}))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def epsilon(noise: float, rounds: int, delta: float = DELTA) -> float:
    """Of (epsilon, delta)-differential privacy of one client's updates, where every client is in every round.

    Renyi divergences of the Gaussian mechanism (Mironov 2017, arXiv:1702.07476), converted as in Balle et al. 2020
    (arXiv:1905.09982, theorem 21).
    """

    def at(order: float) -> float:
        divergence = rounds * order / (2 * noise**2)
        return divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)

    return max(0.0, min(at(1 + 1.05**power / 100) for power in range(250)))


# ---- the server


def _serve(job: Job) -> None:
    own, config = job.own, job.config
    if config.data is not None:
        raise ConfigError("data stays with the clients; give the server --held-out to judge by")
    decoder = load_torch_decoder(spec_from_config(job.parent.config), job.parent)
    matrices = attach_lora(decoder, own.lora_rank, config.seed)
    federation = Federation(own, {name: b.detach().clone() for name, (_, b) in matrices.items()}, job.state)
    if not federation.is_done:
        asyncio.run(_rounds(federation, job, _identity(job.parent, matrices)))
    adapter = {name: (a, federation.b[name]) for name, (a, _) in matrices.items()}
    save_adapter(adapter, job.parent, job.folder, own.lora_rank)
    job.served |= {"lora": {"adapter": str(job.folder)}, "max_lora_rank": own.lora_rank}
    job.notes |= {
        "rounds": federation.round,
        "history": federation.history,
        "refused": dict(federation.refused),
        "bytes_of_an_update": federation.body_bytes,
        "round_share_of_weights": round(2 * federation.body_bytes / job.parent.weight_bytes, 5),
    }
    if own.noise:
        job.notes |= {"epsilon": round(epsilon(own.noise, own.rounds), 4), "delta": DELTA}


async def _rounds(federation: Federation, job: Job, digest: str) -> None:
    own: FederateConfig = job.own
    plan = {"digest": digest, "seed": job.config.seed, "clip": own.clip, "lora_rank": own.lora_rank}
    tenants = TenantFile(Path(own.tenants)) if own.tenants is not None else None
    app = web_of(federation, plan, Authenticator(tenants=tenants))
    settings: dict[str, Any] = {"host": own.host, "port": own.port, "log_config": None, "access_log": False}
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", **settings))
    serving = asyncio.create_task(server.serve())
    noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)  # a known seed would tell it
    try:
        while not (federation.is_done or serving.done()):
            await _one_round(federation, job, serving)
            if len(federation.updates) >= own.min_clients:
                federation.close_round(noise)
        ends = time.monotonic() + PARTING_S
        while federation.behind and not serving.done() and time.monotonic() < ends:
            job.progress(own.rounds, own.rounds, "clients fetch the last round")
            await asyncio.sleep(POLL_S / 5)
    finally:
        server.should_exit = True
        try:
            await serving
        except SystemExit:  # uvicorn's, where it cannot listen
            raise ConfigError(
                f"cannot listen on {own.host}:{own.port}; is the port taken? name another --port"
            ) from None
        finally:
            if tenants is not None:
                tenants.close()
    if not federation.is_done:
        raise KeyboardInterrupt


async def _one_round(federation: Federation, job: Job, serving: asyncio.Task[None]) -> None:
    """Until all that began it have told their updates, or its time is over and there are enough."""
    own, deadline = federation.own, time.monotonic() + federation.own.round_s
    while not (serving.done() or federation.has_all):
        if time.monotonic() > deadline and len(federation.updates) >= own.min_clients:
            return
        job.progress(federation.round, own.rounds, f"rounds at http://{own.host}:{own.port}")
        await asyncio.sleep(POLL_S / 5)


def web_of(federation: Federation, plan: Mapping[str, Any], authenticator: Authenticator) -> Starlette:
    """The server's three routes."""

    def client_of(request: Request) -> str:
        caller = authenticator.check(request.headers.get("authorization", "").encode())
        return caller.key_id or request.headers.get("x-maitred-client", "")[:64] or "unnamed"

    async def show(request: Request) -> Response:
        client_of(request)
        return JSONResponse(plan)

    async def fetch(request: Request) -> Response:
        client = client_of(request)
        if request.query_params.get("after") == str(federation.round) or client in federation.updates:
            return Response(status_code=204)
        headers = {"x-maitred-round": str(federation.round), "x-maitred-done": str(int(federation.is_done))}
        return Response(federation.offer(client), headers=headers, media_type="application/octet-stream")

    async def report(request: Request) -> Response:
        client, body, most = client_of(request), bytearray(), federation.body_bytes + HEADER_BYTES
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise UpdateRefused("huge", 413, f"the body is over {most} bytes")
        examples, number = request.headers.get("x-maitred-examples", "0"), request.path_params["number"]
        federation.take(client, number, int(examples) if re.fullmatch("[0-9]{1,9}", examples) else 0, bytes(body))
        return JSONResponse({"round": number})

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, UpdateRefused):
            federation.refused[error.kind] += 1
        return JSONResponse({"error": {"message": str(error)}}, getattr(error, "status", 401))

    routes = [
        Route("/federate/plan", show),
        Route("/federate/round", fetch),
        Route("/federate/round/{number:int}", report, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={UpdateRefused: refuse, InvalidApiKey: refuse})


def _identity(parent: Checkpoint, matrices: Matrices) -> str:
    """Of the parent's weights (some of each tensor) and of A: equal where both sides train the same."""
    digest = hashlib.sha256()
    for name in sorted(parent.tensor_names()):
        raw = parent.tensor(name)
        digest.update(repr((name, raw.shape, raw.dtype)).encode() + bytes(raw.data[:4096]))
    for name, (a, _) in sorted(matrices.items()):
        digest.update(name.encode() + a.detach().numpy().tobytes())
    return digest.hexdigest()


TOOL = Tool("federate", _serve, learns=False)


# ---- a client


class _Link:
    """HTTP to the server, which may be away for a while."""

    def __init__(self, own: JoinConfig, client: str) -> None:
        self._url, self.sent, self.received = own.url.rstrip("/"), 0, 0
        self._headers = {"x-maitred-client": client}
        if own.api_key:
            self._headers["authorization"] = f"Bearer {own.api_key}"

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body. Raises ConfigError for refusals but 409, and for a server that stays away."""
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                request = urllib.request.Request(f"{self._url}{path}", body, {**self._headers, **headers})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    found = answer.read()
                    self.sent, self.received = self.sent + len(body or b""), self.received + len(found)
                    return answer.status, {name.lower(): each for name, each in answer.headers.items()}, found
            except urllib.error.HTTPError as error:
                words = error.read().decode(errors="replace")[:500]
                if error.code == 409:
                    return 409, {}, words.encode()
                raise ConfigError(f"{self._url} refuses ({error.code}): {words}") from None
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) or time.monotonic() > ends:
                    raise ConfigError(
                        f"cannot reach {self._url} ({error}); is `maitred federate serve` there?"
                    ) from None
                time.sleep(POLL_S)


def join(own: JoinConfig, progress: Progress) -> dict[str, Any]:
    """Take part until the last round; what is told of it. Raises ConfigError."""
    client = own.name or _digest(f"{os.uname().nodename} {Path(own.data).resolve()}".encode())
    link = _Link(own, client)
    with open_checkpoint(own.model) as parent:
        documents, held_out = parted(Reader(parent).read(own.data), own.data)
        progress(0, 1, f"asking {own.url}")
        plan = json.loads(link.ask("/federate/plan")[2])
        decoder = load_torch_decoder(spec_from_config(parent.config), parent)
        matrices = attach_lora(decoder, plan["lora_rank"], plan["seed"])
        if _identity(parent, matrices) != plan["digest"]:
            raise ConfigError(f"the server's model is another one than {parent.name}; give --model, the same files")
    for a, _ in matrices.values():
        a.requires_grad_(False)
    before, counts, number = _loss(decoder, held_out), Counter[str](), -1
    while True:
        status, headers, body = link.ask(f"/federate/round?after={number}")
        if status == 204:
            time.sleep(POLL_S)
            continue
        number = int(headers["x-maitred-round"])
        begun = {name: each.float() for name, each in load(body).items()}
        with torch.no_grad():
            for name, (_, b) in matrices.items():
                b.copy_(begun[name])
        if headers["x-maitred-done"] == "1":
            break
        counts["rounds"] += 1
        _train(decoder, documents, own, number, progress)
        update = _clipped({name: b.detach() - begun[name] for name, (_, b) in matrices.items()}, plan["clip"])
        examples = {"x-maitred-examples": str(len(documents))}
        status, *_ = link.ask(f"/federate/round/{number}", _body(update), **examples)
        counts["accepted" if status == 200 else "late_or_repeated"] += 1
    after = _loss(decoder, held_out)
    told = {"loss_before": round(before, 4), "loss_after": round(after, 4), "examples": len(documents)}
    return {"client": client, **counts, **told, "bytes_sent": link.sent, "bytes_received": link.received}


def _train(decoder: TorchDecoder, documents: list[Document], own: JoinConfig, number: int, progress: Progress) -> None:
    budget = Budget(steps=own.local_steps, lr_scale=(own.learning_rate or LORA_LR) / ADAMW_LR, use_muon=False)
    draw = batches_of(documents, seed=0, num_tokens=BATCH_TOKENS)
    with TemporaryDirectory(prefix="maitred-") as state:
        train(
            decoder,
            reading(decoder),
            lambda step, share: draw(number * own.local_steps + step, share),
            budget,
            Path(state),
            lambda done, total, words: progress(done, total, f"round {number}"),
        )


@torch.no_grad()
def _loss(decoder: TorchDecoder, documents: list[Document]) -> float:
    """Mean of held-out documents (nats)."""
    return float(torch.stack([reading(decoder)(batch_of([each])) for each in documents]).mean())
