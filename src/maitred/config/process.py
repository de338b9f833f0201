"""Configuration of the engines' processes: how many, what each is for, and what happens when one dies."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.config.field_checks import host_and_port, one_of, require_at_least, require_choices
from maitred.core.errors import ConfigError

RESUME_RULES = ("exact", "always", "never")
HANDOVERS = ("auto", "always", "never")
ROLES = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """The engine's own process, and what happens when it dies."""

    in_process: bool = False
    """Run the engine in a thread of the server instead, for debugging: one process, and both die together."""
    step_timeout_s: float = 120.0
    """A step that takes longer (s), or as long a silence, counts as stuck: the engine is killed and started again. With
    --in-process, /health tells it while it lasts."""
    max_restarts: int = 5
    """Restarts in a row before the engine is given up; one that lived for ten seconds ends the row. A kill from outside
    weighs a tenth."""
    resume: str = one_of(RESUME_RULES, "exact")
    """What a request that has tokens does when the engine died: exact goes on where the executor gives the same tokens
    as if nothing had happened, and else ends with an error; always goes on; never ends with an error."""
    mixed_workers: int | None = None
    """Engines of this server, each in a process of its own with a KV cache of its own; requests are shared out among
    them. --num-threads and --kv-cache-memory-bytes are each one's; without, cores and memory are shared out. None is 1,
    or none beside prefill and decode workers."""
    prefill_workers: int = 0
    """Engines that are sent prompts to compute; a decode or mixed worker pulls the KV and goes on with the answer."""
    decode_workers: int = 0
    """Engines that go on with answers whose prompts others computed, and take whole requests where that is faster."""
    handover: str = one_of(HANDOVERS, "auto")
    """Whether a prompt is computed by another worker than its answer: auto does as foretold from queues, free blocks
    and what steps and transfers take here; always wherever it can be; never."""
    role: str = one_of(ROLES, "mixed")
    """What a router of hosts sends this server first: prompts to compute, answers to go on with, or both; it can do
    all. The others need kv_listen."""
    kv_listen: str | None = None
    """HOST:PORT where servers of other hosts that show the same fleet token pull this one's keys and values; a router
    of theirs then chooses where a prompt is computed and where it is answered. Port 0 lets the system choose."""
    sleep_after_s: float | None = None
    """Without a request for so long (s), the engine's process ends and gives its memory back; the server stays, and the
    next request starts the engine and waits for it. None never sleeps by itself."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least("step_timeout_s", self.step_timeout_s, 0.1)
        require_at_least("max_restarts", self.max_restarts, 0)
        require_at_least("sleep_after_s", self.sleep_after_s, 0.1)
        for name in ("mixed_workers", "prefill_workers", "decode_workers"):
            require_at_least(name, getattr(self, name), 0)
        if not self.roles:
            raise ConfigError("mixed_workers is 0, and there are no others; give at least one worker")
        if "prefill" in self.roles and len(set(self.roles)) == 1:
            raise ConfigError(
                f"prefill_workers is {self.prefill_workers}, and nobody goes on with the answers; give decode_workers "
                "or mixed_workers too"
            )
        if self.in_process and len(self.roles) > 1:
            raise ConfigError(
                f"there are {len(self.roles)} workers, and each needs a process of its own; leave in_process out"
            )
        if self.kv_listen is not None:
            host_and_port("kv_listen", self.kv_listen)
            if len(self.roles) > 1:
                raise ConfigError(
                    f"kv_listen is of a server that is one worker, and this one has {len(self.roles)}; leave out either"
                )
        elif self.role != "mixed":
            raise ConfigError(f"role is {self.role!r}, and nobody can pull its KV; give kv_listen HOST:PORT too")
        if self.in_process and self.sleep_after_s is not None:
            raise ConfigError(
                "sleep_after_s needs an engine in a process of its own, whose end gives the memory back; "
                "leave in_process out"
            )

    @property
    def roles(self) -> tuple[str, ...]:
        """Role of each worker, in order."""
        apart = ("prefill",) * self.prefill_workers + ("decode",) * self.decode_workers
        mixed = self.mixed_workers if self.mixed_workers is not None else int(not apart)
        return (*apart, *("mixed",) * mixed)
