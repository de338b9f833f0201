"""Names that the commonest flags and commands of other servers have here: read only when a word is unknown.

Sixty flags of vLLM 0.33, SGLang 0.5.23 and llama-server (of llama-cpp-python 0.3.36), and commands of Ollama. Each is
told and none accepted: a flag of another name has another default, unit or scope. `--` and a `no-` after it are left
out. Flags of ours that are gone stand here too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from maitred.core.errors import did_you_mean

COMMANDS = {
    "list": "maitred models lists models that are packages, maitred ps those of a server, hf cache ls those of the hub",
    "ls": "maitred models lists models that are packages, maitred ps those of a server, hf cache ls those of the hub",
    "pull": "maitred serve OWNER/NAME downloads a model of the hub when it is first served",
    "show": "maitred explain MODEL tells how a model would be run",
    "rm": "hf cache rm removes what was downloaded from the hub; packed weights bound themselves",
    "stop": "end maitred serve with Ctrl-C or SIGTERM; a server has one model for as long as it runs",
    "create": "not yet: a model is served as its file says; --generation-config and --chat-template change that",
    "cp": "--served-model-name NAME gives a model more names",
    "run": "maitred chat MODEL talks to a model; maitred run answers a file of batch lines",
    "deploy": "maitred serve MODEL serves one here, deploy/kubernetes puts a fleet on Kubernetes",
    "manifests": "gone: deploy/kubernetes and deploy/haproxy have the files, docs/fleet.md tells how they are applied",
    "quantize": "or maitred serve MODEL --dtype int8 (or int4), which quantises at load",
    "run-batch": "maitred run -i FILE -o FILE answers a file of batch lines",
}

EQUAL = "here it is "
_FLAGS = """
here it is MODEL (or --model MODEL), a folder, a GGUF file or a hub id
  -m -hf model-path
here it is --max-model-len TOKENS, the context of one request
  -c ctx-size context-length n-ctx
here it is --max-num-seqs REQUESTS
  -np parallel max-running-requests
here it is --max-num-batched-tokens TOKENS, of a step
  -b batch-size chunked-prefill-size
here it is --kv-cache-memory-bytes BYTES
  gpu-memory-utilization mem-fraction-static
here it is --dtype int8 (or int4), quantised at load
  quantization
here it is --kv-dtype bfloat16|int8|float32
  -ctk -ctv cache-type-k cache-type-v kv-cache-dtype
here it is --num-threads THREADS
  -t threads
here it is --tensor-parallel RANKS, processes of this machine
  -tp tp tp-size tensor-parallel-size
here it is --mixed-workers WORKERS, engines of this server
  dp-size data-parallel-size
here it is --no-enable-prefix-caching
  disable-radix-cache
here it is --policy NAME, see maitred policies
  scheduling-policy schedule-policy
here it is --generation-config KEY=VALUE, such as --generation-config temperature=0.2
  temp
here it is --speculative ngram (or draft, mtp, off)
  speculative-config speculative-algorithm
here it is --speculative-model DIR
  -md model-draft speculative-draft-model-path
here it is --num-speculative-tokens TOKENS
  draft-max speculative-num-draft-tokens
here it is --lora NAME=DIR
  lora-modules lora-paths
here it is --lora-dir DIR, or --lora NAME=DIR
  enable-lora
here it is --served-model-name NAME
  -a alias
here it is --log-level debug|info|warning|error
  -v
not yet: splits over machines, or by layers; --tensor-parallel is this one's, maitred route --replicas is data parallel
  pipeline-parallel-size
not yet: a model lies whole on one device (--device cpu or cuda), never part of it on another
  -ngl n-gpu-layers
not needed: kernels and threads are chosen for the machine; maitred explain tells which
  -fa flash-attn enforce-eager
not needed: a step is one batch of prefill and decode, of --max-num-batched-tokens
  enable-chunked-prefill
not needed: how calls are written is read off the chat template; --tool-format NAME says otherwise
  tool-call-parser enable-auto-tool-choice
not needed: how thoughts are written is read off the chat template; a request turns them off by reasoning_effort: none
  reasoning-parser
not needed: a model's own Python code is never run
  trust-remote-code
not needed: the model's own config, tokenizer and template are taken
  jinja
not needed: HF_HOME, HF_TOKEN and HF_HUB_OFFLINE in the environment say that
  download-dir
not needed: a request brings its seed
  seed
gone: keys and values on disk are not encrypted any more; give --kv-disk a folder of an encrypted disk
  kv-disk-key-file
gone: KV is taken from workers of the same weights' dtype, executor and instruction set alone
  kv-compat
gone: a worker keeps the role it was started with (--prefill-workers, --decode-workers, --role)
  role-switching
"""
FLAGS: dict[str, str] = {}  # name -> what it is called here, or why there is none
for _line in _FLAGS.strip().splitlines():
    if not _line.startswith(" "):
        _answer = _line
    else:
        FLAGS |= dict.fromkeys(_line.split(), _answer)


def what_was_meant(flag: str, own: Sequence[str]) -> str:
    """The name here of another server's flag, or the one of `own` that was mistyped; empty if neither is known."""
    told = flag_named(flag) if "--max-num-seqs" in own else None  # elsewhere flags of servers mean nothing
    if told is None:
        return did_you_mean(flag, own, cutoff=0.8)
    names = set(re.findall(r"--[a-z0-9-]+", told))
    elsewhere = ", of maitred serve" if told.startswith(EQUAL) and names and not names & set(own) else ""
    return f"; {told}{elsewhere}"


def flag_named(flag: str) -> str | None:
    """The name here of another server's flag, or why there is none; None for a flag that the table does not name."""
    name = flag.removeprefix("--").replace("_", "-")
    return FLAGS.get(name) or FLAGS.get(name.removeprefix("no-"))
