"""llama.cpp's own HTTP server out of its prebuilt wheel, until SIGTERM.

    python -m peers.xllamacpp_server --model FILE.gguf --parallel 8 --ctx-size 8192 --port 8080

No cache of prompts, no speculation; a thread for each processor it may use, batches as its server takes them.
"""

import argparse
import os
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = args.model
    parameters.model_alias = {"bench"}
    parameters.port, parameters.n_parallel, parameters.n_ctx = args.port, args.parallel, args.ctx_size
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = args.threads
    parameters.cache_ram_mib, parameters.cache_prompt = 0, False
    server = xllamacpp.Server(parameters)
    print(xllamacpp.get_system_info(), server.listening_address, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pause()


if __name__ == "__main__":
    main()
