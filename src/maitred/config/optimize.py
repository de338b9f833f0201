"""Configuration of the tools that change a model: what is common to all, and each tool's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from maitred.config import DTYPES, KV_DTYPES
from maitred.config.field_checks import one_of, require_at_least, require_between, require_choices, require_over_0
from maitred.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolConfig:
    """The model, its data, and what is asked of the result"""

    model: str | None = None
    """The parent: a folder, a GGUF file, a packaged model or a hub id; None is what serve takes without a model."""
    out: str = field(metadata={"metavar": "DIR"})
    """Folder of the result; it appears when the gate has let the result through. The same command again goes on."""
    data: str | None = field(default=None, metadata={"metavar": "FILE"})
    """JSON lines of {"messages"}, {"text"} or {"token_ids"}, learnt from; None lets the parent write its own."""
    held_out: str | None = field(default=None, metadata={"metavar": "FILE"})
    """The same, judged on; no document may be in both. None keeps a tenth of the data out of it."""
    tasks: str | None = field(default=None, metadata={"metavar": "FILE"})
    """JSON lines of {"messages", "answer", "match": "exact"|"contains"|"regex"|"choice", "choices", "category"}."""
    gate: str | None = field(default=None, metadata={"metavar": "FILE"})
    """YAML of rules, such as max_kl: 0.05; rules that it does not name are the tool's own."""
    seed: int = 0
    """Of everything drawn; the same seed makes the same model."""
    steps: int | None = None
    """Training steps; None leaves it to the minutes."""
    minutes: float | None = None
    """Training time; None is the tool's own."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.minutes is not None:
            raise ConfigError("steps and minutes exclude each other; give one of them")
        if not Path(self.out).name:
            raise ConfigError(f"out is {self.out!r}; name a folder that is not there yet")
        require_at_least("seed", self.seed, 0)
        require_at_least("steps", self.steps, 1)
        require_at_least("minutes", self.minutes, 0.01)


DRAFT_KINDS = ("mtp", "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The draft, and what it learns"""

    kind: str = one_of(DRAFT_KINDS, "mtp")
    """mtp is a head of one layer that reads the model's states (EAGLE-3); draft a small model of its own."""
    student: str = "1/9"
    """Of a draft model: share of the parent's parameters, or sizes (layers=3,hidden=128)."""
    replay_share: float = 0.25
    """Of what is learnt from --data, the share of general text, which the parent writes; the gate asks on it too."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_between("replay_share", self.replay_share, 0.0, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """The adapter"""

    lora_rank: int = 8
    """Rank of the adapters (LoRA), whose product is scaled by 2; serve takes up to --max-lora-rank."""

    def __post_init__(self) -> None:
        require_between("lora_rank", self.lora_rank, 1, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(LoraShape):
    """What is trained"""

    full: bool = False
    """Train all weights; the result is an ordinary model folder."""
    merge: bool = False
    """Add the trained adapter to the weights; the result is an ordinary model folder."""
    learning_rate: float | None = None
    """Peak; None is 0.001 for adapters, 0.0001 for all weights."""

    def __post_init__(self) -> None:
        if self.full and self.merge:
            raise ConfigError("full and merge exclude each other: without an adapter there is nothing to merge")
        LoraShape.__post_init__(self)
        require_over_0(self, "learning_rate", most=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class FederateConfig(LoraShape):
    """The federation"""

    rounds: int = 10
    """Rounds in all."""
    min_clients: int = 2
    """Updates without which a round does not end."""
    clip: float = 10.0
    """Most norm of a client's update; clients clip to it, and larger ones are refused."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise on the sum of updates, in clips; the report tells epsilon."""
    round_s: float = 600.0
    """A round ends after this long (s) without the clients that have not told their updates."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8100
    """Port to listen on."""
    tenants: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Tenants with their keys (maitred keys); a key is one client. None lets in any client that reaches the port."""

    def __post_init__(self) -> None:
        LoraShape.__post_init__(self)
        for name in ("rounds", "min_clients"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("noise", self.noise, 0)
        require_between("port", self.port, 1, 65535)
        require_over_0(self, "clip", "round_s", most=1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """A client of a federation"""

    url: str = field(metadata={"metavar": "URL"})
    """The server: http://HOST:8100."""
    data: str = field(metadata={"metavar": "FILE"})
    """JSON lines of {"messages"}, {"text"} or {"token_ids"}, which stay here; a tenth is held out to judge by."""
    local_steps: int = 20
    """Training steps in each round."""
    model: str | None = None
    """The parent, the same files as the server's; None is what serve takes without a model."""
    learning_rate: float | None = None
    """Peak in each round; None is 0.001."""
    name: str | None = None
    """Of this client among those without keys; None is made from this machine and the file's place."""
    api_key: str | None = field(default=None, metadata={"env": "MAITRED_API_KEY", "metavar": "KEY"})
    """Key of a tenant."""

    def __post_init__(self) -> None:
        require_at_least("local_steps", self.local_steps, 1)
        require_at_least("learning_rate", self.learning_rate, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """Quantisation"""

    scheme: str = one_of(("int8", "int4", "mixed"), "int4")
    """Bits of the layers' matrices. mixed promotes them from int4 to int8, by KL per byte, until the gate passes."""
    method: str = one_of(("gptq", "rtn", "awq", "smoothquant", "qat"), "gptq")
    """Way of rounding: gptq lets later weights make up for earlier ones, rtn rounds each alone, awq and smoothquant
    first move scales out of the inputs, qat trains on from gptq's codes (--steps or --minutes, 3 unless asked)."""
    group_size: int | None = None
    """Weights of a row that share a scale, a multiple of 32; None is 32 for int4, the whole row for int8."""
    symmetric: bool = True
    """int4 without a minimum of each group: Q4_0's form, else Q4_1's, of GGUF files alone, which loses less and takes
    0.5 bits more for a weight."""
    to: str = one_of(("folder", "gguf"), "folder")
    """A compressed-tensors folder, or a GGUF file: of a folder with a byte-level BPE tokenizer, or of another file."""
    kv_dtype: str = one_of(KV_DTYPES, "auto")
    """KV cache with which the result is measured; serve it with the same."""
    calibration_tokens: int = 32768
    """Most tokens of the data that layers are rounded on."""

    def __post_init__(self) -> None:
        require_choices(self)
        if (self.method, self.scheme) == ("qat", "mixed"):
            raise ConfigError("method qat trains one number format; choose scheme int4 or int8")
        if not self.symmetric and self.to != "gguf":
            raise ConfigError("a folder's groups have no minima; leave --no-symmetric out, or write --to gguf")
        require_at_least("group_size", self.group_size, 32)
        require_at_least("calibration_tokens", self.calibration_tokens, 64)
        if self.group_size is not None and self.group_size % 32:
            raise ConfigError(f"group_size is {self.group_size}; weights are served in blocks of 32: give a multiple")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """What is measured"""

    model: str | None = None
    """What is measured, in the format that is served; None is what serve takes without a model."""
    against: str | None = field(default=None, metadata={"metavar": "MODEL"})
    """The parent, which is read in float32: KL, flips, ratio of perplexities and drop of scores are against it. The
    same model as MODEL tells what the served format costs."""
    held_out: str | None = field(default=None, metadata={"metavar": "FILE"})
    """JSON lines of {"messages"}, {"text"} or {"token_ids"}; None lets the parent (or MODEL) write some."""
    tasks: str | None = field(default=None, metadata={"metavar": "FILE"})
    """JSON lines of {"messages", "answer", "match": "exact"|"contains"|"regex"|"choice", "choices", "category"}."""
    draft: str | None = field(default=None, metadata={"metavar": "MODEL"})
    """Draft model or head, whose acceptance is measured."""
    gain: bool = False
    """Time decoding against the parent as that is served; with --draft, against MODEL without it."""
    escalate_to: str | None = field(default=None, metadata={"metavar": "MODEL"})
    """Larger model that answers tasks of which MODEL is not sure: score against the share escalated, by P, and the
    least P at which the drop from it alone passes max_task_drop (0.02 where no rule says)."""
    gate: str | None = field(default=None, metadata={"metavar": "FILE"})
    """YAML of rules, such as max_kl: 0.05; exit 3 where one is broken."""
    dtype: str = one_of(DTYPES, "auto")
    """Weights, as for serve."""
    kv_dtype: str = one_of(KV_DTYPES, "auto")
    """KV cache, as for serve."""
    seed: int = 0
    """Of what is written and drawn."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least("seed", self.seed, 0)
        if self.escalate_to is not None and self.tasks is None:
            raise ConfigError("escalate_to is judged by answers; give tasks as well")


PATTERNS = ("none", "2:4")
PRUNE_METHODS = ("magnitude", "wanda", "sparsegpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneConfig:
    """What is taken out"""

    neurons: float = 0.0
    """Share of each layer's MLP neurons, of which a multiple of 32 is left."""
    heads: float = 0.0
    """Share of each layer's attention heads: whole groups of a key/value head and its queries."""
    layers: int = 0
    """Layers, those that turn the residual stream least."""
    pattern: str = one_of(PATTERNS, "none")
    """2:4 stores two zeroes in each four weights instead; no kernel here is faster by them."""
    method: str = one_of(PRUNE_METHODS, "sparsegpt")
    """How a pattern's zeroes are chosen: by weight, by weight times input, or with the others making up for them."""
    recover_steps: int | None = None
    """Steps in which the result learns its parent's distributions, as --steps or --minutes say too; None is none."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_between("neurons", self.neurons, 0.0, 0.99)
        require_between("heads", self.heads, 0.0, 0.99)
        require_at_least("layers", self.layers, 0)
        require_at_least("recover_steps", self.recover_steps, 1)
        if (self.pattern != "none") == bool(self.neurons or self.heads or self.layers):
            raise ConfigError("give neurons, heads or layers to take out, or else a pattern of zeroes")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """The student, and what it learns"""

    student: str = "1/4"
    """Share of the parent's parameters, or sizes (layers=3,hidden=128,heads=4,kv_heads=2,intermediate=320), cut out
    of the parent; or a model of the same tokens to start from."""
    temperature: float = 1.0
    """Of the soft labels; higher ones tell more of unlikely tokens."""
    hard_share: float = 0.1
    """Of the loss, what the data's own tokens weigh; the rest is the distance to the parent."""
    own_share: float = 0.0
    """Of the batches, those that the student writes, for the parent to judge."""
    lr_scale: float = 1.0
    """Multiplies the learning rates."""
    sweep: bool = False
    """Also train students of 1/2, 1/4 and 1/9 and one on hard labels alone, as many steps each, for the report."""

    def __post_init__(self) -> None:
        require_at_least("temperature", self.temperature, 0.1)
        require_at_least("lr_scale", self.lr_scale, 1e-6)
        for name in ("hard_share", "own_share"):
            require_between(name, getattr(self, name), 0.0, 1.0)
