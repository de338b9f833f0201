"""First contact: each side proves the fleet token to the other (HMAC over fresh nonces), and they compare layouts.

The token itself is never sent. What follows on the connection is neither encrypted nor signed: a fleet's network is its
own, as for its HTTP.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from maitred.kv.channel import Channel
from maitred.kv.compat import Layout, Terms, agree, layout_of
from maitred.kv.pieces import REASONS, VERSION, AnyMessage, Challenge, Hello, Message, Refusal, Refused, Welcome

NONCE_BYTES = 32
_SOURCE, _RECEIVER = b"maitred kv source", b"maitred kv receiver"
M = TypeVar("M", bound=Message)


class Identity(NamedTuple):
    """Claims of one end about itself. Without a token nothing is proved: for peers on this machine alone."""

    layout: Layout
    token: bytes | None


class Ring(NamedTuple):
    """Slots for the pieces of a connection, none where bytes are sent; how the peer maps them (`fd`) or reads them."""

    slot_bytes: int
    num_slots: int = 0
    fd: int | None = None
    agent: bytes = b""  # NIXL's description of the source, and where in it the ring lies
    base: int = 0


def greet(channel: Channel, own: Identity, epoch: int, ring_for: Callable[[Terms], Ring]) -> Terms:
    """The source's part. Raises Refusal, which the peer was told."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    channel.send(Challenge(VERSION, nonce))
    hello = expect(channel.receive(), Hello)
    try:
        _check_version(hello.version)
        if not _is_proof(hello.proof, own.token, _RECEIVER, nonce + hello.nonce, hello.layout):
            raise Refusal("stranger", "the receiver does not know this fleet's token; give both --fleet-token-file")
        terms = agree(own.layout, layout_of(hello.layout), receives=False)
        ring = ring_for(terms)
    except Refusal as refusal:
        channel.send(Refused(0, refusal.reason, str(refusal)))
        raise
    layout = msgspec.msgpack.encode(own.layout)
    proof = _proof(own.token, _SOURCE, hello.nonce + nonce, layout)
    fd, told = ring.fd, (ring.slot_bytes, ring.num_slots, ring.agent, ring.base)
    channel.send(Welcome(proof, layout, epoch, *told), fd=fd)
    channel.trust()
    return terms


def introduce(channel: Channel, own: Identity) -> tuple[Terms, Welcome]:
    """The receiver's part. Raises Refusal."""
    challenge = expect(channel.receive(), Challenge)
    _check_version(challenge.version)
    nonce, layout = secrets.token_bytes(NONCE_BYTES), msgspec.msgpack.encode(own.layout)
    channel.send(Hello(VERSION, nonce, _proof(own.token, _RECEIVER, challenge.nonce + nonce, layout), layout))
    welcome = expect(channel.receive(), Welcome)
    if not _is_proof(welcome.proof, own.token, _SOURCE, nonce + challenge.nonce, welcome.layout):
        raise Refusal("stranger", "the source does not know this fleet's token; give both --fleet-token-file")
    terms = agree(own.layout, layout_of(welcome.layout), receives=True)
    channel.trust()
    return terms, welcome


def expect(message: AnyMessage, kind: type[M]) -> M:
    """The message, if it is of that kind. Raises Refusal for others; the peer's own, if it refused."""
    if isinstance(message, Refused):
        raise refusal_of(message)
    if not isinstance(message, kind):
        raise Refusal("garbage", f"the peer sent {type(message).__name__} where {kind.__name__} belongs")
    return message


def refusal_of(message: Refused) -> Refusal:
    """The peer's refusal; its reason counts as ours if we have it too."""
    return Refusal(message.reason if message.reason in REASONS else "garbage", message.text)


def _check_version(version: int) -> None:
    if version != VERSION:
        raise Refusal("unlike", f"KV transfers have version {VERSION} here, {version} there; serve the same maitred")


def _proof(token: bytes | None, role: bytes, nonces: bytes, layout: bytes) -> bytes:
    """Empty without a token. The role keeps one's proof from being sent back as the other's."""
    return b"" if token is None else hmac.digest(token, b"\0".join((role, nonces, layout)), "sha256")


def _is_proof(proof: bytes, token: bytes | None, role: bytes, nonces: bytes, layout: bytes) -> bool:
    fresh = len(nonces) == 2 * NONCE_BYTES
    return fresh and hmac.compare_digest(proof, _proof(token, role, nonces, layout))
