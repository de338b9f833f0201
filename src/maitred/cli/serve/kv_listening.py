"""`maitred serve --kv-listen`: whether this server can be a worker of several hosts, checked before anything loads."""

from __future__ import annotations

from maitred.api.http.fleet_token import FleetToken
from maitred.config import CacheConfig, MachineShare
from maitred.errors import ConfigError
from maitred.field_checks import host_and_port


def share_of(listen: str | None, cache: CacheConfig, token: FleetToken) -> MachineShare:
    """What the engine is told. Raises ConfigError for what nobody could pull from."""
    if listen is None:
        return MachineShare()
    if not token.is_set:
        raise ConfigError(
            f"kv_listen is {listen}, and nobody proves that he may pull from there; give the servers and their router "
            "the same --fleet-token-file"
        )
    if cache.kv_transport == "shm":
        raise ConfigError("kv_transport is shm, which ends at this machine; leave it at auto, or kv_listen out")
    if not cache.enable_prefix_caching:
        raise ConfigError("kv_listen gives what the prefix cache finds; leave enable_prefix_caching on, or it out")
    from maitred.transfer.tcp import listen as bound

    bound(*host_and_port("kv_listen", listen), has_token=True).close()  # a slip costs no loading time
    ((_, secret),) = token.shown()
    return MachineShare(exchanges_kv=True, kv_listen=listen, kv_token=secret)
