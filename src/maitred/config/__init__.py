"""Every setting, one frozen dataclass per part, checked once where it enters and handed on in slices.

Those of the HTTP server stand in `server`, those of its engines' processes in `process`, those of drafts in
`speculative`; all are imported from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from maitred.config.field_checks import one_of, require_at_least, require_between, require_choices
from maitred.config.process import HANDOVERS, RESUME_RULES, ProcessConfig
from maitred.config.server import AdmissionConfig, ServerConfig
from maitred.config.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from maitred.core.errors import ConfigError
from maitred.core.step import DEFAULT_TOKEN_BUDGET
from maitred.core.tensor_request import ModelChange

__all__ = (
    "DEFAULT_TOKEN_BUDGET",
    "HANDOVERS",
    "MAX_SPECULATIVE_TOKENS",
    "RESUME_RULES",
    "AdmissionConfig",
    "ProcessConfig",
    "ServerConfig",
    "SpeculativeConfig",
)  # defined elsewhere

EXECUTORS = ("auto", "torch", "native")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")
LM_HEAD_DTYPES = DTYPES
DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32"}
HALF = ("half", "float16", "fp16", "f16")
BIND_THREADS = ("auto", "on", "off")
POLICY_NAMES = ("fcfs", "priority", "interactive", "sjf", "srpt", "rr", "mlfq", "edf", "least_slack", "vtc", "lpm")
"""Ours; packages may bring more."""
PREDICTOR_NAMES = ("max_tokens", "quantile", "ranker")
SIMULATED_PREDICTOR_NAMES = ("oracle", *PREDICTOR_NAMES, "adversarial")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, and how its numbers are held."""

    model: str | None = None
    """GGUF file, folder in Hugging Face layout, hub id, or a name that `maitred models` lists (a folder of that name is
    ./NAME); None is MAITRED_MODEL's, else smollm2 where its package is installed, else maitred-mini."""
    revision: str | None = None
    """Hub branch, tag or commit; None is the default branch."""
    executor: str = one_of(EXECUTORS, "auto")
    """auto, torch or native."""
    device: str = one_of(DEVICES, "auto")
    """auto, cpu or cuda; auto takes a GPU when PyTorch sees one."""
    dtype: str = one_of(DTYPES, "auto")
    """Weights and activations; auto is the checkpoint's own dtype where the device is fast at it, else float32. int8
    and int4 are quantised at load, by the native executor."""
    lm_head_dtype: str = one_of(LM_HEAD_DTYPES, "auto")
    """Output matrix and embedding (native executor); auto is as `dtype`, but int8 where that is int4."""
    kv_dtype: str = one_of(KV_DTYPES, "auto")
    """KV cache; auto is the weights' dtype, and bfloat16 where that is int8 or int4. int8 and int4 are the native
    executor's."""
    max_model_len: int | None = None
    """Context in tokens, prompt and output; None is the model's own, reduced to what memory holds."""
    weight_cache: str = "auto"
    """Folder that keeps packed weights, so that later starts map them; auto is maitred/weights in XDG_CACHE_HOME
    (~/.cache), off keeps none. Native executor, weights from 64 MiB."""
    weight_cache_max_bytes: int = 32 * 2**30
    """Most bytes in that folder; what was used longest ago goes first."""
    num_threads: int | None = None
    """CPU threads of the executor, at most the physical cores this process may use; None is these cores, or one below
    30 M parameters, and the native executor uses fewer of them as long as measured steps are faster so. With ranks it
    is threads of each, and None shares the cores among them."""
    tensor_parallel: int = 1
    """Ranks: processes that compute each step together, each with its own part of the weights, near its processors
    (native executor). The tokens are those of one process."""
    bind_threads: str = one_of(BIND_THREADS, "auto")
    """Whether the native executor's threads keep to a processor each, where they are as many as this process may use:
    on, off, or auto, which is on in an engine's own process, as under maitred serve."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the model's chat template."""
    tool_format: str | None = None
    """How the model writes calls of tools, by name; None reads it off the chat template."""
    allow_special_tokens_in_content: bool = False
    """Read `<|im_end|>`, `<tool_call>` and the like in a message as the token, so that its author can end the turn and
    begin one of any role; else they are plain text (`<tool_call>`, `<think>` in what users and tools say alone)."""
    forced_tokens: bool = True
    """Tokens that a grammar leaves no choice for are taken without computing logits for them. The text is the same."""
    generation_config: Mapping[str, float | int | None] = field(default_factory=dict)
    """Overrides of the model's generation_config.json (temperature, top_p, top_k, ...)."""

    def __post_init__(self) -> None:
        for name in ("dtype", "lm_head_dtype", "kv_dtype"):
            if (dtype := getattr(self, name)) in HALF:
                raise ConfigError(f"{name} is {dtype!r}; float16 is not computed here, bfloat16 takes as many bytes")
            object.__setattr__(self, name, DTYPE_ALIASES.get(dtype, dtype))
        require_choices(self)
        if self.model is not None and not self.model.strip():
            raise ConfigError(
                f"model is {self.model!r}; name a folder or hub id, or leave it out for the built-in model"
            )
        require_at_least("max_model_len", self.max_model_len, 2)
        require_at_least("num_threads", self.num_threads, 1)
        require_at_least("tensor_parallel", self.tensor_parallel, 1)
        require_at_least("weight_cache_max_bytes", self.weight_cache_max_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens in a block. Smaller wastes less memory and shares shorter prefixes, larger costs less bookkeeping."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for keys and values; None takes what max_num_seqs full contexts need, bounded by free memory."""
    enable_prefix_caching: bool = True
    """Keep blocks of finished requests and share them with requests that begin alike."""
    swap_memory_bytes: int | None = None
    """Host memory for keys and values of preempted requests, used where copying beats computing again; None is 4 GiB
    (at most a quarter of what is free) with a GPU, and 0 on a CPU: there a larger KV cache serves better."""
    state_cache_memory_bytes: int | None = None
    """Bytes for snapshots of recurrent layers' states, at which requests that begin alike go on; the slots of requests
    that do not run hold some, too. None is a snapshot for each of max_num_seqs, of free memory a quarter at most."""
    kv_transport: str = one_of(("auto", "shm", "tcp", "nixl"), "auto")
    """How KV moves between workers: shm (memory of this machine), tcp, nixl, or auto, the first of them that works."""
    kv_lease_s: float = 30.0
    """How long (s) a worker keeps KV for another that says nothing; it is renewed while that one waits."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least("kv_lease_s", self.kv_lease_s, 0.1)
        require_at_least("block_size", self.block_size, 1)
        require_at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        require_at_least("swap_memory_bytes", self.swap_memory_bytes, 0)
        require_at_least("state_cache_memory_bytes", self.state_cache_memory_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersConfig:
    """KV that outlives requests and restarts."""

    kv_host_bytes: int = 0
    """Host memory that keeps keys and values of finished requests beside those in the engine's own KV memory: for an
    engine on a GPU. What was used longest ago goes first; 0 keeps none."""
    kv_disk: str | None = None
    """Folder that keeps keys and values of finished requests, so that a conversation which goes on later, after a
    restart too, is not computed again. One server's alone; None keeps none."""
    kv_disk_max_bytes: int = 16 * 2**30
    """Most bytes in that folder; what was used longest ago goes first."""
    kv_redis: str | None = None
    """URL of a Redis server or cluster in which servers of the same model share keys and values of finished requests;
    servers with tenants need the same --fleet-token-file to find each other's. How much it keeps is Redis's own matter
    (maxmemory). None keeps none there."""
    kv_redis_max_block_bytes: int = 4 * 2**20
    """Largest block that is kept in Redis; a model whose blocks are larger is refused."""
    kv_staging_bytes: int = 256 * 2**20
    """Most bytes of keys and values that wait in memory to be stored; what comes while there are more is not stored."""

    def __post_init__(self) -> None:
        require_at_least("kv_host_bytes", self.kv_host_bytes, 0)
        require_at_least("kv_disk_max_bytes", self.kv_disk_max_bytes, 1)
        require_at_least("kv_staging_bytes", self.kv_staging_bytes, 1)
        require_at_least("kv_redis_max_block_bytes", self.kv_redis_max_block_bytes, 1)
        if self.kv_disk is not None and not self.kv_disk.strip():
            raise ConfigError(f"kv_disk is {self.kv_disk!r}; name a folder, or leave it out")

    @property
    def are_wanted(self) -> bool:
        return self.kv_disk is not None or self.kv_redis is not None or self.kv_host_bytes > 0

    def of_engine(self, number: int, num_engines: int) -> TiersConfig:
        """The tiers of one of several engines alike: a folder in --kv-disk, and a part of all bytes."""
        if num_engines == 1:
            return self
        return replace(
            self,
            kv_host_bytes=self.kv_host_bytes // num_engines,
            kv_disk=f"{self.kv_disk}/worker-{number}" if self.kv_disk is not None else None,
            kv_disk_max_bytes=max(1, self.kv_disk_max_bytes // num_engines),
        )


UNMEASURED_AGEING = 200.0  # tokens/s
SCHEDULER_RANGES: dict[str, tuple[float, float]] = {
    "ageing_s": (0.001, 1e9),
    "ageing_tokens_per_s": (0.001, 1e9),
    "output_token_weight": (1.0, 1e6),
    "quantum_tokens": (1, 2**31),
    "mlfq_levels": (1, 32),
    "default_ttft_slo_s": (0.0, 1e9),
    "prefill_tokens_per_s": (0.001, 1e12),
    "tensor_share": (0.01, 1.0),
    "batch_slack": (0.0, 10.0),
}
"""Lowest and highest: what a policy computes with must be finite."""

PolicyArg = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters, served beside the model under names of their own (native executor)."""

    lora: Mapping[str, str] = field(default_factory=dict)
    """NAME=DIR: an adapter as PEFT saves it, which answers as the model NAME. May be repeated."""
    lora_dir: str | None = None
    """Folder whose adapters may be loaded and unloaded while the server runs (/v1/load_lora_adapter); None allows
    none."""
    max_lora_rank: int = 64
    """Adapters of higher rank are refused."""
    lora_memory_bytes: int = 2**30
    """Most memory for adapters; those not in use go when others need the room, and come back when asked
    for."""

    def __post_init__(self) -> None:
        require_between("max_lora_rank", self.max_lora_rank, 1, 1024)
        require_at_least("lora_memory_bytes", self.lora_memory_bytes, 1)
        for name, path in self.lora.items():
            if not isinstance(path, str) or not name or "@" in name:
                raise ConfigError(f"lora has {name}={path}; write NAME=DIR, and no @ in the name")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler: order of service, and the size of a step."""

    max_num_batched_tokens: int | None = None
    """Most tokens in one step. Larger raises throughput and inter-token latency. None is what suits the executor: 64 a
    thread, at least 128, where the native one runs, twice that with AMX, and 512 at most and with PyTorch; never below
    max_num_seqs."""
    max_num_seqs: int = 64
    """Most requests in one step."""
    policy: str = "fcfs"
    """Order of the queue: fcfs, priority, interactive, sjf, srpt, rr, mlfq, edf, least_slack, vtc, lpm, or an installed
    one; `maitred policies` tells what each does."""
    policy_args: Mapping[str, PolicyArg] = field(default_factory=dict)
    """Arguments of the policy, an installed one's too; `maitred policies` lists them. For those that have a setting of
    their own, such as ageing_s, this is another spelling, which goes before it."""
    ageing_s: float = 30.0
    """Waiting this long (s) outweighs one level of priority (priority, interactive, edf, least_slack) or of mlfq, and
    any cached prefix (lpm), against starvation.
    """
    ageing_tokens_per_s: float | None = None
    """sjf, srpt, interactive, lpm: waiting a second outweighs this many tokens of expected work or cached prefix. None
    is 1/128 of the prompt tokens that this device computes in a second, as its steps show; 200 until they do."""
    output_token_weight: float = 2.0
    """sjf, srpt, interactive, vtc: an output token costs as much as this many input tokens."""
    quantum_tokens: int = 128
    """rr, mlfq: output tokens after which a request makes room for those that wait; doubled with each level of mlfq."""
    mlfq_levels: int = 6
    """mlfq: number of levels."""
    default_ttft_slo_s: float = 1.0
    """edf, least_slack: objective (s) from arrival to first token of a request of priority 0 that names none; each
    level of priority adds ageing_s."""
    prefill_tokens_per_s: float = 2000.0
    """least_slack: prompt tokens computed in a second, to know how long before its deadline a request must start."""
    predictor: str = one_of(PREDICTOR_NAMES, "ranker")
    """How output lengths are guessed: max_tokens, quantile (history) or ranker (learns from words of the prompt)."""
    tensor_share: float = 0.5
    """Share of the machine that batches of tensor models may take while the language model has requests; without any
    they take all of it."""
    batch_slack: float = 0.05
    """Share by which background requests (lines of batches) may lengthen a step that others are in, by measured step
    costs; they have steps without others to themselves."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least("max_num_seqs", self.max_num_seqs, 1)
        for name, (low, high) in SCHEDULER_RANGES.items():
            if getattr(self, name) is not None:
                require_between(name, getattr(self, name), low, high)
        if self.token_budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}), so a full decode batch would not fit; raise the first or lower the second"
            )

    @property
    def token_budget(self) -> int:
        """Most tokens in one step, where no executor has been asked."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_TOKEN_BUDGET, self.max_num_seqs)

    @property
    def ageing_rate(self) -> float:
        """Value of `ageing_tokens_per_s`, or a guess until the device was measured."""
        return UNMEASURED_AGEING if self.ageing_tokens_per_s is None else self.ageing_tokens_per_s

    def settled(self, token_budget: int) -> SchedulerConfig:
        """Return the config with the executor's budget where none was given."""
        if self.max_num_batched_tokens is not None:
            return self
        return replace(self, max_num_batched_tokens=max(token_budget, self.max_num_seqs))


NO_MODEL = "none"  # in place of a language model's folder: there is none, and tensor models alone are served


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorConfig:
    """Tensor models (ONNX), served beside the language model or, with the model `none`, without one."""

    model_repository: str | None = None
    """Folder of tensor models in Triton's layout, or one .onnx file; see docs/tensor.md."""
    tfs_model_config: str | None = None
    """TF Serving's model_config_list (protobuf text) in place of a repository: names, base paths, versions, labels."""
    tfs_batching_parameters: str | None = None
    """TF Serving's BatchingParameters (protobuf text), laid over the config of every model."""
    model_control_mode: str = one_of(("none", "poll", "explicit"), "none")
    """When tensor models are loaded: at the start (none), as their folders change (poll), or as an administrator asks
    (explicit)."""
    load_model: tuple[str, ...] = ()
    """NAME: a tensor model that is loaded at the start in mode explicit; `*` is all. May be repeated."""
    repository_poll_s: float = 15.0
    """How often the repository is looked at in mode poll."""
    allow_repository_code: bool = False
    """Run model.py files of the repository, in processes of their own: write access to it runs code here."""
    tensor_arena_bytes: int = 256 * 2**20
    """Memory that server and engine share for tensors over 4 KiB; taken as it is used. What does not fit is copied."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_between("repository_poll_s", self.repository_poll_s, 0.01, 86400.0)
        require_between("tensor_arena_bytes", self.tensor_arena_bytes, 0, 2**40)
        if self.load_model and self.model_control_mode != "explicit":
            raise ConfigError("load_model is for model_control_mode explicit; in the others all models are loaded")
        if self.model_repository is not None and self.tfs_model_config is not None:
            raise ConfigError("model_repository and tfs_model_config both say which models there are; give one of them")
        if not self.serves and (self.load_model or self.model_control_mode != "none" or self.tfs_batching_parameters):
            raise ConfigError(
                "model_control_mode, load_model and tfs_batching_parameters are of a repository; give model_repository"
            )

    @property
    def serves(self) -> bool:
        """Return whether there are tensor models."""
        return self.model_repository is not None or self.tfs_model_config is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShare:
    """Share of the machine for an engine, where several share it."""

    num_engines: int = 1
    """Alike, of which it is one."""
    available_bytes: int | None = None
    """Memory that was free before the first of them; None is what is free as it starts."""
    exchanges_kv: bool = False
    """They pull KV from each other."""
    kv_listen: str | None = None
    """HOST:PORT where engines of other hosts pull it too."""
    kv_token: bytes | None = field(default=None, repr=False)
    """Secret that both ends of a transfer prove; None between processes of one machine."""
    result_cache_bytes: int = 0
    """Memory for answers of tensor models: its part of the server's result cache."""
    result_cache_ttl_s: float = 3600.0
    """They are given again for this long."""
    tensor_memory: int | None = None
    """Descriptor of the memory that it shares with its server; None is none."""
    models: tuple[ModelChange, ...] = ()
    """Loads and unloads of tensor models that an engine before it was asked for, and that it begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: model, cache, scheduler, drafts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    share: MachineShare = field(default_factory=MachineShare)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    tensors: TensorConfig = field(default_factory=TensorConfig)
    decision_log: str | None = None
    """Folder for the log of every step's inputs and plan (hashes, never prompt tokens); None keeps none."""
    decision_log_max_bytes: int = 64 * 1024 * 1024
    """A file of the decision log is followed by the next when it is this large."""
    decision_log_max_files: int = 16
    """Of a run, this many files of the decision log are kept, the newest."""

    def __post_init__(self) -> None:
        require_at_least("decision_log_max_bytes", self.decision_log_max_bytes, 4096)
        require_at_least("decision_log_max_files", self.decision_log_max_files, 1)
        if self.tiers.kv_disk is not None and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "kv_disk keeps what the prefix cache finds; leave enable_prefix_caching on, or kv_disk out"
            )


PARTS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "speculative": SpeculativeConfig,
    "lora": LoraConfig,
    "tiers": TiersConfig,
}
"""Parts of an EngineConfig that are flags and arguments of every engine, by its fields."""
