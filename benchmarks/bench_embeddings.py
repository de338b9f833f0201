"""Texts to vectors: maitred and sentence-transformers on this CPU, in turn, in one run; ratios of tokens a second.

    python benchmarks/bench_embeddings.py --peer /path/to/venv/bin/python [--shapes bge-small,qwen3-0.6b] [--rounds 2]

The peer's environment has sentence-transformers. Random weights of the models' real shapes, in bfloat16; texts of w0 w1
..., a token each: 32 of 128 tokens, and 32 of 16 to 512. Both tokenise, both get all texts in one call of `embed` or
`encode`; each round runs every contender once, and the best of its rounds counts. The peer runs in float32 and in
bfloat16, and the faster one is what ratios are taken of; int8 is another class of quality, and named so.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RUNS = Path(__file__).resolve().parents[1] / "runs" / "embeddings"
SHAPES: dict[str, dict[str, Any]] = {
    "bge-small": {
        "kind": "Bert", "vocab_size": 30_522, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 512,
    },
    "qwen3-0.6b": {
        "kind": "Qwen3", "vocab_size": 151_669, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
AIMS = {"bge-small": 2.0, "qwen3-0.6b": 1.3}
NUM_WORDS = 1000


def texts_of(lengths: Sequence[int]) -> list[str]:
    """Texts of so many tokens, with the two that the tokenizer adds."""
    choose = random.Random(7)
    return [" ".join(f"w{choose.randrange(NUM_WORDS)}" for _ in range(length - 2)) for length in lengths]


def workloads(count: int) -> dict[str, list[str]]:
    choose = random.Random(3)
    mixed = [choose.randint(16, 512) for _ in range(count)]
    return {f"{count} x 128": texts_of([128] * count), f"{count} of 16-512": texts_of(mixed)}


def make_folder(name: str) -> Path:
    """A random checkpoint as sentence-transformers save one; made by the peer's Python, which has torch."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import models, pre_tokenizers, processors

    folder, shape = RUNS / name, dict(SHAPES[name])
    folder.mkdir(parents=True, exist_ok=True)
    kind = shape.pop("kind")
    config = getattr(transformers, f"{kind}Config")(**shape)
    torch.manual_seed(0)
    getattr(transformers, f"{kind}Model")(config).to(torch.bfloat16).save_pretrained(folder)
    if kind == "Qwen3":  # as its folders say
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(told | {"architectures": ["Qwen3ForCausalLM"]}))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{at}" for at in range(NUM_WORDS))]
    inner = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=512, **named).save_pretrained(folder)
    pooling = "lasttoken" if kind == "Qwen3" else "cls_token"
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{each}" if at else "",
            "type": f"sentence_transformers.models.{each}",
        }
        for at, each in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    width = {"word_embedding_dimension": shape["hidden_size"]}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(width | {f"pooling_mode_{pooling}": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    return folder


def timed(embed: Callable[[list[str]], Any], texts: list[str]) -> tuple[float, Any]:
    began = time.perf_counter()
    vectors = embed(texts)
    return time.perf_counter() - began, vectors


def serve_peer(folder: str, dtype: str) -> None:
    """Answers lines of texts with seconds and vectors; in the peer's Python."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"torch_dtype": getattr(torch, dtype)})
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, vectors = timed(lambda texts: model.encode(texts, batch_size=32), json.loads(line))
        print(json.dumps([seconds, vectors.tolist()]), flush=True)


class Peer:
    """sentence-transformers in a process of its own."""

    def __init__(self, python: str, folder: Path, dtype: str) -> None:
        command = [python, __file__, "--serve", str(folder), dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        while self._process.stdout.readline().strip() != "ready":
            assert self._process.poll() is None, "the peer has ended"

    def run(self, texts: list[str]) -> tuple[float, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        seconds, vectors = json.loads(self._process.stdout.readline())
        return seconds, vectors

    def close(self) -> None:
        self._process.terminate()


def compare(name: str, python: str, rounds: int, theirs: Sequence[str], ours: Sequence[str], count: int) -> None:
    import numpy as np

    from maitred import LLM

    folder = RUNS / name
    if not (folder / "modules.json").is_file():
        subprocess.run([python, __file__, "--make", name], check=True)
    peers = {f"sentence-transformers {dtype}": Peer(python, folder, dtype) for dtype in theirs}
    models = {
        f"maitred {dtype}": LLM(str(folder), executor="native", dtype=dtype, enable_prefix_caching=False)
        for dtype in ours
    }
    contenders: dict[str, Callable[[list[str]], tuple[float, Any]]] = {each: peer.run for each, peer in peers.items()}
    contenders |= {each: lambda texts, llm=llm: timed(llm.embed, texts) for each, llm in models.items()}
    for what, texts in workloads(count).items():
        num_tokens = sum(len(text.split()) + 2 for text in texts)
        best, vectors = dict.fromkeys(contenders, float("inf")), {}
        for round_number in range(1 + rounds):
            for contender, run in contenders.items():
                seconds, vectors[contender] = run(texts[:4] if round_number == 0 else texts)  # the first warms up
                if round_number:
                    best[contender] = min(best[contender], seconds)
        exact = np.asarray(vectors[f"sentence-transformers {theirs[0]}"])
        peer_s = min(seconds for contender, seconds in best.items() if contender in peers)
        for contender, seconds in best.items():
            cosine = float(np.min(np.sum(exact * np.asarray(vectors[contender]), axis=1)))
            print(
                f"{name:11} {what:13} {contender:31} {num_tokens / seconds:8,.0f} tokens/s  {peer_s / seconds:5.2f}x  "
                f"least cosine with the first {cosine:.5f}" + ("" if contender in peers else f"  (aim {AIMS[name]}x)"),
                flush=True,
            )
    for peer in peers.values():
        peer.close()
    for llm in models.values():
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable, help="Python of an environment with sentence-transformers")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--peer-dtypes", default="float32,bfloat16")
    parser.add_argument("--dtypes", default="bfloat16,int8", help="of maitred")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_folder(options.make)
    elif options.serve:
        serve_peer(*options.serve)
    else:
        dtypes = options.peer_dtypes.split(","), options.dtypes.split(",")
        for name in options.shapes.split(","):
            compare(name, options.peer, options.rounds, *dtypes, options.texts)


if __name__ == "__main__":
    main()
