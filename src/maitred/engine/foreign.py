"""What flags and commands of other servers are called here: read only when a word is unknown.

Flags of vLLM 0.33, SGLang 0.5.23, llama-server (of llama-cpp-python 0.3.36), tritonserver and tensorflow_model_server.
Each is told and none accepted: a flag of another name has another default, unit or scope. `--` and a `no-` after it are
left out. `*` stands for anything, and only below an answer that names no flag as equal: two that end alike may differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from maitred.errors import did_you_mean

COMMANDS = {
    "list": "maitred ps lists the models that a server holds, hf cache ls those that were downloaded",
    "ls": "maitred ps lists the models that a server holds, hf cache ls those that were downloaded",
    "pull": "maitred serve OWNER/NAME downloads a model of the hub when it is first served",
    "show": "maitred explain MODEL tells how a model would be run",
    "rm": "hf cache rm removes what was downloaded from the hub; packed weights bound themselves",
    "stop": "end maitred serve with Ctrl-C or SIGTERM; a server has one model for as long as it runs",
    "create": "not yet: a model is served as its folder says; --generation-config and --chat-template change that",
    "cp": "--served-model-name NAME gives a model more names",
    "run": "maitred chat MODEL talks to a model; maitred run answers a file of batch lines",
    "plan": "maitred explain MODEL tells how a model would be run, maitred serve --help what it needs of memory",
    "deploy": "maitred serve MODEL serves one here, deploy/kubernetes puts a fleet on Kubernetes",
    "quantize": "maitred serve MODEL --dtype int8 (or int4) quantises at load",
    "prune": "not yet: weights are served as they are; --dtype int8 (or int4) makes them smaller",
    "distill": "not yet: models are not trained here; --speculative-model DIR takes a small one that was",
    "run-batch": "maitred run -i FILE -o FILE answers a file of batch lines",
}

EQUAL, NOT_YET, NOT_NEEDED = "here it is ", "not yet: ", "not needed: "
FLAGS = """
gone: keys and values on disk are not encrypted any more; give --kv-disk a folder of an encrypted disk
  kv-disk-key-file
gone: KV is taken from workers of the same weights' dtype, executor and instruction set alone
  kv-compat
here it is MODEL (or --model MODEL), a folder, a GGUF file or a hub id
  -m -mu -hf -hfr hf-repo model-url model-path model-repository model-store model-base-path
here it is --tfs-model-config FILE, of tensor models
  model-config-file
here it is --tfs-batching-parameters FILE, of tensor models
  batching-parameters-file
here it is --max-model-len TOKENS, the context of one request
  -c ctx-size context-length n-ctx max-seq-len
here it is --max-num-seqs REQUESTS
  -np parallel max-running-requests
here it is --max-num-batched-tokens TOKENS, of a step
  -b -ub batch-size chunked-prefill-size max-prefill-tokens n-batch max-num-scheduled-tokens
here it is --block-size TOKENS
  page-size
here it is --kv-cache-memory-bytes BYTES
  gpu-memory-utilization device-memory-utilization mem-fraction-static max-total-tokens num-gpu-blocks-override
  per-process-gpu-memory-fraction
here it is --swap-memory-bytes BYTES, for preempted requests
  swap-space
here it is --dtype int8 (or int4), quantised at load
  -q quantization
here it is --kv-dtype bfloat16|int8|float32
  -ctk -ctv cache-type-k cache-type-v kv-cache-dtype
here it is --num-threads THREADS
  -t threads n-threads tensorflow-intra-op-parallelism tensorflow-session-parallelism
here it is --tensor-parallel RANKS, processes of this machine
  -tp tp tp-size tensor-parallel-size
here it is --mixed-workers WORKERS, engines of this server
  -dp dp dp-size data-parallel-size
here it is --bind-threads on
  -C -Cr cpu-mask cpu-range cpu-strict numa numa-bind numa-bind-cpus numa-bind-nodes numa-node
here it is --no-enable-prefix-caching, and --enable-prefix-caching
  disable-radix-cache cache-prompt
here it is --policy NAME, see maitred policies
  scheduling-policy schedule-policy
here it is --policy priority (or interactive), see maitred policies
  enable-priority-scheduling
here it is --max-queued-requests SAMPLES
  max-num-queued-reqs
here it is --max-queued-tokens TOKENS
  max-num-queued-tokens
here it is --generation-config KEY=VALUE, such as --generation-config temperature=0.2
  temp temperature top-k top-p min-p repeat-penalty presence-penalty frequency-penalty override-generation-config
  preferred-sampling-params
here it is --chat-template FILE
  chat-template-file
here it is --speculative ngram (or draft, mtp, off)
  -sc speculative-config speculative-algorithm spec-type spec-method enable-mtp
here it is --speculative-model DIR
  -md model-draft spec-model spec-draft-model speculative-draft-model speculative-draft-model-path
here it is --num-speculative-tokens TOKENS
  draft draft-max draft-n spec-tokens spec-draft-n-max speculative-num-draft-tokens speculative-num-steps
here it is --lora NAME=DIR
  lora-modules lora-paths
here it is --lora-dir DIR, or --lora NAME=DIR
  enable-lora
here it is --lora-memory-bytes BYTES
  max-loras max-cpu-loras max-loras-per-batch max-loaded-loras
here it is --served-model-name NAME
  -a alias model-name
here it is --host ADDRESS
  http-address
here it is --port PORT
  http-port rest-api-port
here it is --max-body-bytes BYTES
  http-max-input-size
here it is --cors-origins ORIGIN
  allowed-origins rest-api-enable-cors-support
here it is --ssl-certfile FILE
  ssl-cert-file
here it is --ssl-keyfile FILE
  ssl-key-file
here it is --sse-keep-alive-s SECONDS
  sse-ping-interval sse-keep-alive-interval
here it is --header-timeout-s, --body-timeout-s and --send-timeout-s, in seconds
  -to timeout
here it is --request-timeout-s SECONDS
  rest-api-timeout-in-ms
here it is --drain-timeout SECONDS
  shutdown-timeout exit-timeout-secs
here it is --step-timeout-s SECONDS
  watchdog-timeout
here it is --tenants FILE, with a hash of each key
  api-key-file admin-api-key
here it is --log-level debug|info|warning|error
  -v -lv verbose log-verbose verbosity log-verbosity uvicorn-log-level log-level-http log-info log-warning log-error
  log-disable disable-log-stats disable-uvicorn-access-log
here it is --log-format json (or text)
  log-jsonl
here it is --lm-head-dtype float32
  enable-fp32-lm-head
here it is --device auto|cpu|cuda
  -dev backend
here it is maitred completion bash
  completion-bash
here it is --otlp-endpoint URL
  otlp-traces-endpoint
here it is maitred --version
  version
here it is --help
  usage
not yet: splits over machines, or by layers; --tensor-parallel is this one's, maitred route --replicas is data parallel
  dist-timeout -pp -dp -pcp -dcp -asc -sm -ts -mg -dpa -dpb -dpe -dph -dpl -dpm -dpn -dpp -dpr pp dp
  moe-data-parallel-size max-ep-size dwdp-size api-server-count nnodes node-rank master-addr master-port headless
  rpc split-mode tensor-split main-gpu device-ids base-gpu-id gpu-id-step load-balance-method moe-dense-tp-size
  max-parallel-loading-workers enable-dense-mlp-attn-tp enable-shared-experts-attn-tp shared-experts-tp-size
  disable-custom-all-reduce enable-p2p-check enable-symm-mem enable-torch-symm-mem enable-mscclpp
  enable-fault-tolerance fault-tolerance-config enable-batch-sharded-sampling enable-two-batch-overlap
  enable-single-batch-overlap enable-kv-cache-sharding enable-layernorm-sp enable-hc-sp enable-peer-access
  enable-megamoe-for-layernorm-sp moe-dp-size attn-cp-size attn-dp-size tensor-parallel* pipeline-parallel*
  data-parallel* prefill-context-parallel* decode-context-parallel* attention-*-parallel-size dp-* pp-* dcp-* cp-*
  *-cp *-cp-* *-dp-* dist* *distributed* *-nccl* nccl-* *ray* elastic-ep-* enable-elastic-* enable-attn-tp-*
  disable-attn-tp-* enable-tp-* all2all-* tbo-* *allreduce*
not yet: more to set of speculative decoding than --speculative, --speculative-model and --num-speculative-tokens
  -td -tbd -hfd -hfrd -ctkd -ctvd -devd -ngld -Cd -Crd -Cbd -otd -cmoed -ncmoed -lcs -lcd
  enable-multi-layer-eagle per-request-spec-decode-metrics speculative-token-map spec-* speculative-* draft* *-draft
  *-draft-* lookup-cache-* decoupled-spec-*
not yet: more to set of LoRA than --lora, --lora-dir, --max-lora-rank and --lora-memory-bytes
  *lora* control-vector*
not yet: tools that the server itself runs
  -ag agent ui-mcp-proxy webui-mcp-proxy tools tools-* tool-server mcp-*
not needed: how calls are written is read off the chat template; --tool-format NAME says otherwise
  skip-chat-parsing tool-* *-tool-*
not needed: how thoughts are written is read off the chat template; a request turns them off by reasoning_effort: none
  -rea enable-strict-thinking reasoning* *-thinking-* cohere-*
not needed: a request brings it: response_format, or structured_outputs with json, regex, choice or grammar
  -j -jf disable-outlines-disk-cache grammar* json-schema* structured-outputs* constrained-json*
not yet: images, audio and video: text only
  -mm -mmu -mmdev language-model-only language-only enable-multimodal mm-* *-mm-* mmproj* image-* *image-processor
  video-* asr-* allowed-local-media* allowed-media* media-* mtmd-* encoder-* enable-*-encoder
not yet: embeddings, ranking and other tasks than generation
  -dc runner convert task pooling pooler-config is-embedding embedding embeddings rerank reranking
  enable-flash-late-interaction enable-prompt-embeds enable-mis enable-precise-embedding-interpolation
  diffusion-config spm-infill completion-template enable-response-store file-storage-path tokens-only
  enable-scale-out embd-* prefill-only-* dllm-*
not yet: other outputs than text, token ids and logprobs
  aux-output-config return-* enable-return-*
not yet: plugging in code by a flag; a policy of yours comes by entry point, docs/policies.md tells how
  middleware worker-cls worker-extension-cls scheduler-cls forward-hooks logits-processors io-processor-plugin
  enable-custom-logit-processor custom-weight-loader
not yet: mixtures of experts
  -ep ep enable-ep-weight-filter enable-dbo enable-waterfill ep-* eplb-* *-eplb *expert* *moe* kt-* deepep-*
  fuseep-* dbo-*
not yet: Mamba and linear attention
  mamba-block-size mamba-* *-mamba-* linear-* *replayssm* gdn-* kda-*
not yet: a model lies whole on one device (--device cpu or cuda), never part of it on another
  -ngl -ot -kvo -nkvo -ncffn gpu-layers n-gpu-layers kv-offload op-offload override-tensor n-cpu-ffn
  model-load-gpu-limit cpu-offload-* offload-* offload-mode ple-*
not yet: prefixes in host memory or elsewhere, and prefill and decode apart
  -cram cache-ram enable-hicache enable-hierarchical-cache enable-lmcache enable-session-radix-cache
  enable-streaming-session slot-save-path cache-reuse cache-config cache-directory engram-config sm-group-num
  encoder-bootstrap-port engine-info-bootstrap-port radix-cache-backend swa-prefix-tails hicache-* kv-offloading-*
  kv-transfer* kv-events* ec-* disaggregation-* *-pd-* *pdmux* mooncake-* lmcache-* *flexkv*
  *unified-cache-external* *hisparse* hierarchical-sparse-* response-cache-* *linker* kv-sharing-*
not yet: a server has one model, and loads it when it starts
  -cl -dr cache-list model-control-mode load-model repository-poll-secs load-retry-interval-micros
  max-num-load-retries model-namespacing enable-memory-saver enable-cumem-allocator weight-version
  vertex-ai-default-model docker-repo repoagent-directory models-* model-config-* file-system-poll-* num-*load-*
  model-load-* allow-version-labels-* *sleep* weight-transfer* *weights-cpu-backup remote-instance-*
  checkpoint-engine-* rl-* modelexpress-*
not yet: choosing one file of a repository: a folder of safetensors is served, or a GGUF file of this machine
  -hff -lm -lzm hf-file override-kv quantization-param-path quantize-and-serve load-format load-mode lazy-mode
  model-loader-extra-config prefer-tflite-model saved-model-tags *-default fim-* modelopt-* num-tflite-*
not yet: HTTP/2 and Unix sockets: HTTP/1.1 on one port; gRPC is for tensor models, with --grpc-port
  uds reuse-port reuse-http-port allow-sagemaker allow-vertex-ai use-alts-credentials allow-client-shm
  enable-http-worker-reuseport grpc* *-grpc* smg-* *http2* sagemaker* vertex-ai* buffer-manager-* sidecar*
not yet: a path before the routes
  root-path fastapi-root-path api-prefix
not yet: samplers other than temperature, top_k, top_p, min_p and penalties
  samplers sampler-seq sampling-seq top-nsigma top-n-sigma repeat-last-n mirostat* dry-* xtc-* dynatemp-* typical*
  adaptive-*
not yet: clients' certificates and ciphers: --ssl-certfile and --ssl-keyfile are what there is
  ssl-ca-certs ssl-cert-reqs ssl-ciphers ssl-keyfile-password ssl-config-file
not yet: rope other than in the model's config.json
  hf-overrides hf-config-path json-model-override-args model-class-overrides rope-* yarn-* decrypted-*
not yet: a default priority: a request or its tenant brings one (--tenants FILE)
  default-priority-value abort-on-priority-when-disabled
not yet: a file to log to: the log is stderr
  log-file log-requests-target crash-dump-folder logging-config export-metrics-* log-config*
in vLLM it is --nnodes, not yet: one engine on one machine; in llama-server --n-predict: a request brings max_tokens
  -n
in vLLM it is --node-rank, not yet: one engine on one machine; in llama-server --reverse-prompt: a request brings stop
  -r
not needed: a request brings it: max_tokens, seed, stop, logit_bias, ignore_eos, n, chat_template_kwargs
  -s -l -e -sp seed random-seed n-predict predict ignore-eos logit-bias reverse-prompt escape special keep
  prefill-assistant chat-template-kwargs default-chat-template-kwargs max-logprobs logprobs-mode sampling-defaults
  sampling-mask-max-tokens trust-request-chat-template stream-response-default-include-usage
  enable-force-include-usage
not needed: a model's own Python code is never run
  trust-remote-code code-revision
not needed: the model folder's config, tokenizer and template are taken
  response-role strict-model-config disable-auto-complete-config tokenizer skip-tokenizer-init jinja
  hf-chat-template-name chat-template-content-format detokenizer-worker-num renderer-num-workers allow-auto-truncate
  enable-tokenizer-info-endpoint model-config-parser config-format model-impl tokenizer-* *tokenizer-batch*
not needed: HF_HOME, HF_TOKEN and HF_HUB_OFFLINE in the environment say that
  -hft hf-token download-dir offline ignore-patterns
not needed: a step is one batch of prefill and decode, of --max-num-batched-tokens
  -cb -nocb -tb -Cb -Crb cont-batching ubatch-size threads-batch cpu-mask-batch cpu-range-batch cpu-strict-batch
  prio-batch poll-batch enable-batching enable-per-model-batching-parameters
  enable-chunked-prefill enable-mixed-chunk async-scheduling disable-overlap-schedule num-scheduler-steps
  stream-interval enable-prefill-delayer max-num-active-seqs batch-notify-size incremental-streaming-output
  min-free-slots-delay num-reserved-decode-tokens enable-dynamic-* scheduler-* num-continuous-* long-prefill-*
  prefill-* schedule-*
not needed: one pool of blocks for all requests, planned at start and told in the log
  -kvu -fit -fitc -fitt -dt -sps -ctxcp -cms fit fit-ctx fit-target defrag-thold slot-prompt-similarity
  cache-idle-slots ctx-checkpoints context-shift checkpoint-min-step enable-prefix-mm-cache retraction-policy
  disable-priority-preemption enable-watermark disable-sliding-window disable-hybrid-kv-cache-manager
  enable-unified-memory c128-page-size context-bucket kv-unified* swa-* *-swa-* prefix-cach* prefix-match* radix-*
  priority-scheduling-* watermark* kv-cache-* disable-chunked-* optimistic-* pinned-memory-pool-* cuda-memory-pool-*
  cuda-virtual-* enable-page-major-*
not needed: kernels and threads are chosen for the machine; maitred explain tells which
  -fa -cc -ac -nr -bs flash-attn compilation-config attention-config enforce-eager optimization-level
  performance-mode kernel-config repack poll prio warmup warmups boundary-reduction min-supported-compute-capability
  disable-cascade-attn prefill-attention-backend prefill-kv-cache-dequant-dtype list-devices enable-scattered-sconv
  perf threads-http http-thread-count rest-api-num-threads no-host host-policy flush-filesystem-caches *-backend
  *-backend-* backend-* *cuda-graph* *cudagraph* *compile* *flashinfer* *triton* *monokernel* *megakernel* *-fused-*
  *-warmup mlx-* qsa-* *indexer* *-dsa-* enable-tf32-* use-fp64-* enable-lean-* enable-quant-* xla-cpu-*
  tensorflow-* thread-pool-* platform-config-* enable-shm-* jit-* gc-* rate-limit*
not needed: weights are mapped, packed once and kept (--weight-cache)
  weight-cache-mode weight-cache-socket weight-cache-timeout use-tqdm-on-load check-tensors model-checksum
  rl-quant-profile allow-deprecated-quantization quantization-config safetensors-* weight-* pt-load-* delete-ckpt-*
  startup-weight-* remove-unused-fields-* enable-signature-*
not needed: an answer is the same bits whatever shares the batch (native executor)
  enable-deterministic-inference
not needed: certificates are read again when they change, or at SIGHUP
  enable-ssl-refresh
not needed: /metrics, /health, the page and the access log are always there
  ui-config metrics-port metrics allow-http enable-cache-report enable-prompt-tokens-details slots props ui webui
  path max-log-len log-prefix log-timestamps log-colors enable-server-load-tracking disable-fastapi-docs
  enable-offline-docs enable-request-id-headers log-prompts-dir decode-log-interval aggregate-engine-logging
  extra-metric-labels enable-logging-iteration-details allow-credentials allowed-methods allowed-headers tags
  strict-readiness log-error-stack metrics-* *-metrics *-metrics-* ui-* webui-* log-requests* *-log-requests*
  enable-log-* *request-time-stats* bucket-* *-buckets disable-access-log-* uvicorn-access-* monitoring-* show-*
  cors-* http-header-* http-restricted-* fingerprint-* load-*
not needed: a deadlock or crash ends the engine's process, and the next one goes on
  watchdog-config soft-watchdog-*
not needed: spans go to --otlp-endpoint, and maitred why and replay tell what was decided
  profiler-config enable-profiler spec-trace-dir trace-* *-trace* otlp-* *nvtx* *debug* msprobe-* kv-canary*
not needed: it turns something inside another engine
  id ir-op-priority additional-config fail-on-environ-validation exit-on-error gated-launch-port h11-*
"""


def what_was_meant(flag: str, own: Sequence[str]) -> str:
    """What another server's flag is called here, or which of `own` was mistyped; nothing if nobody knows."""
    has_engine = "--max-num-seqs" in own  # elsewhere flags of servers mean nothing
    told = flag_named(flag) if has_engine else None
    if told is None and ((near := did_you_mean(flag, own, cutoff=0.8)) or not has_engine):
        return near
    told = told or flag_alike(flag)
    if told is None:
        return ""
    names = set(re.findall(r"--[a-z0-9-]+", told))
    elsewhere = ", of maitred serve" if told.startswith(EQUAL) and names and not names & set(own) else ""
    return f"; {told}{elsewhere}"


def flag_named(flag: str) -> str | None:
    """What another server's flag is called here, or why there is none; None for one that the table does not name."""
    name = flag.removeprefix("--").replace("_", "-")
    told = {word: answer for answer, words in _answers() for word in words}
    return told.get(name) or told.get(_affirmed(name))


def flag_alike(flag: str) -> str | None:
    """The same for one that only begins or ends as others do."""
    name = _affirmed(flag.removeprefix("--").replace("_", "-"))
    return next((answer for answer, words in _answers() if any(_matches(name, word) for word in words)), None)


def _affirmed(name: str) -> str:
    """`no-x` -> `x`, `-no-x` -> `-x`."""
    return name.replace("no-", "", 1) if name.startswith(("no-", "-no-")) else name


def _matches(name: str, pattern: str) -> bool:
    return "*" in pattern and fnmatchcase(name, pattern)


def _answers() -> Iterator[tuple[str, list[str]]]:
    answer = ""
    for line in FLAGS.strip().splitlines():
        if line.startswith(" "):
            yield answer, line.split()
        else:
            answer = line
