"""What a number format costs on real models and real text: perplexity of prompts against float32 of the same weights.

    .venv/bin/python benchmarks/quality.py [--model smollm2 --model gemma3-270m] [--tokens 20000] [--weights int8 int4]
        [--kv bfloat16] [--peer runs/peers]

Texts are those of this Python and this repository (documentation, code, licences) and articles of the Universal
Declaration of Human Rights in other scripts, so nothing is fetched; they are cut into windows of 512 tokens. Models are
names out of `maitred models`, folders or GGUF files. Prints for each format of weights and of KV the perplexity's ratio
to float32, the share of positions whose likeliest token is another than float32's, and the KL divergence from it.

--peer takes the folder in which `cpu_peers.py --model FILE --setup` put llama.cpp, whose server then answers 20 prompts
greedily. Printed are the share of its tokens that are maitred's likeliest too, and how many whole answers are. Neither
depends on what a first difference leads to, for maitred reads llama.cpp's answer, with the bits of its own decoding.
"""

from __future__ import annotations

import argparse
import inspect
import json
import json.decoder
import re
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data import topics

import numpy as np
from peers.contact import serving
from peers.entries import entries, missing

from maitred import LLM, SamplingParams
from maitred.model.checkpoint import open_checkpoint
from maitred.model.packaged import PACKAGED
from maitred.optimize.data import Document, text_of
from maitred.optimize.evaluate import evaluate
from maitred.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
WINDOW = 512
WEIGHTS = {"float32": "float32", "the file's": "auto", "bfloat16": "bfloat16", "int8": "int8", "int4": "int4"}
KV_FORMATS = ("float32", "bfloat16", "int8", "int4")
SCRIPTS = """Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью и
должны поступать в отношении друг друга в духе братства. Каждый человек имеет право на жизнь, на свободу и на личную
неприкосновенность.
人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。人人有权享有生命、自由和人身安全。任何人不得使为奴隶或奴役。
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性と良心とを授けられており、
互いに同胞の精神をもって行動しなければならない。すべて人は、生命、自由及び身体の安全に対する権利を有する。
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 양심을 부여받았으며 서로
형제애의 정신으로 행동하여야 한다.
يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. وقد وهبوا عقلاً وضميرًا وعليهم أن يعامل بعضهم بعضًا بروح الإخاء.
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. Είναι προικισμένοι με λογική και
συνείδηση, και οφείλουν να συμπεριφέρονται μεταξύ τους με πνεύμα αδελφοσύνης.
Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de conscience et
doivent agir les uns envers les autres dans un esprit de fraternité.
Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt und sollen
einander im Geist der Brüderlichkeit begegnen.
"""  # articles 1, 3 and 4
QUESTIONS = """
What is gravity? Name three primary colors. Write a short poem about rain. What is the capital of Italy? Explain how a
bicycle works. Why is the sky blue? Give me a recipe for pancakes. Who wrote Hamlet? What does a compiler do? List the
planets of the solar system. How do plants make food? What is 12 + 7? Write a Python function that adds two numbers.
Describe a cat. What is a prime number? Define democracy. Tell me a story about a fox. How can I sleep better? What is
the Internet? Translate 'good day' to French."""
PROMPTS = [text.strip() for text in re.findall(r"[^.?]+[.?]", QUESTIONS.replace("\n", " "))]
ANSWER = 64  # tokens of llama.cpp's answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be given more than once")
    parser.add_argument("--tokens", type=int, default=20_000, help="0 leaves perplexity out")
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--kv", nargs="*", choices=KV_FORMATS, default=list(KV_FORMATS))
    parser.add_argument("--peer", type=Path, metavar="WORK", help="compare greedy answers with llama.cpp's")
    options = parser.parse_args()
    for model in options.model or ["smollm2", "gemma3-270m"]:
        if options.tokens:
            print_perplexities(model, options)
        if options.peer:
            print_agreement(model, options)


def print_perplexities(model: str, options: argparse.Namespace) -> None:
    with open_checkpoint(model) as parent:
        documents = windows(text_of(parent).tokenizer, options.tokens)
        print(f"\n{model}, {sum(int(each.learnt.sum()) for each in documents):,} tokens, against float32")
        print("| weights |" + "".join(f" KV {kv} |" for kv in options.kv) + "\n|---|" + "--:|" * len(options.kv))
        for weights in options.weights:
            print(f"| {weights} |", end="", flush=True)
            for kv in options.kv:
                served = {"dtype": WEIGHTS[weights], "kv_dtype": kv}
                found = evaluate(str(parent.path), against=parent, documents=documents, served=served).figures
                ratio, flips, kl = (found[name].value for name in ("perplexity_ratio", "flips", "kl"))
                print(f" {ratio:.4f} ({flips:.1%}, {kl:.4f}) |", end="", flush=True)
            print(flush=True)


def print_agreement(model: str, options: argparse.Namespace) -> None:
    with opened(model, "auto", "bfloat16") as llm:
        prompts = [prompt_ids(llm, text) for text in PROMPTS]
    answers = peer_answers(options.peer, model, prompts)
    print(f"\n{model}, llama.cpp's greedy answers, {sum(map(len, answers)):,} tokens")
    print("| weights | its token is the likeliest | whole answers alike |\n|---|--:|--:|")
    for weights in options.weights:
        kv = "float32" if weights == "float32" else "bfloat16"
        with opened(model, WEIGHTS[weights], kv) as llm:
            texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
            alike = [
                [a == b for a, b in zip(read[-len(answer) :], answer, strict=True)]
                for read, answer in zip(likeliest(llm, texts), answers, strict=True)
            ]
        share = sum(map(sum, alike)) / sum(map(len, alike))
        print(f"| {weights} | {share:.1%} | {sum(map(all, alike))} of {len(alike)} |", flush=True)


def peer_answers(work: Path, model: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    file = PACKAGED[model].path() if model in PACKAGED else Path(model)
    (entry,) = (entry for entry in entries(work.resolve(), str(file)) if entry.peer == "xllamacpp")
    if reason := missing(entry, work):
        sys.exit(f"llama.cpp cannot answer: {reason}")
    answers = []
    with serving(entry, 1, WINDOW, work / "quality.log") as (port, _):
        for prompt in prompts:
            ask = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "logprobs": 1}
            body, headers = json.dumps(ask).encode(), {"content-type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
            with urllib.request.urlopen(request) as answer:
                answers.append([token["id"] for token in json.load(answer)["choices"][0]["logprobs"]["content"]])
    return answers


def opened(model: str, dtype: str, kv_dtype: str) -> LLM:
    limits = {"max_model_len": WINDOW + 8, "kv_cache_memory_bytes": 2**28}
    return LLM(model, dtype=dtype, kv_dtype=kv_dtype, speculative="off", **limits)


def likeliest(llm: LLM, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The likeliest token at each position of each prompt but the first."""
    for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)):
        yield [max(read, key=lambda each: read[each].logprob) for read in (answer.prompt_logprobs or [])[1:] if read]


def windows(tokenizer: Tokenizer, num_tokens: int) -> list[Document]:
    """Equal parts of each text, `num_tokens` in all; what a short one lacks the others have more.

    Each begins as the model's texts do.
    """
    texts = [
        SCRIPTS,
        (HERE.parent / "LICENSE").read_text(),
        inspect.getsource(json.decoder) + inspect.getsource(argparse),
        "\n".join(topics.topics[name] for name in sorted(topics.topics)),
    ]
    encode, found, left = tokenizer.encode, list[list[int]](), num_tokens
    begin = encode("")
    size = WINDOW - len(begin)
    for num_texts, text in zip(range(len(texts), 0, -1), texts, strict=True):
        ids = encode(text, add_special_tokens=False)[: left // num_texts]
        found += [[*begin, *ids[at : at + size]] for at in range(0, len(ids) - 1, size)]
        left -= len(ids)
    return [Document(np.array(ids, np.int32), np.arange(len(ids)) > 0) for ids in found]


def prompt_ids(llm: LLM, text: str) -> list[int]:
    """A question for a model that chats, the beginning of a text for one that completes."""
    if (template := llm.model.chat_template) is None:
        return llm.get_tokenizer().encode(text)
    rendered = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    return llm.get_tokenizer().encode(rendered, add_special_tokens=False)


if __name__ == "__main__":
    main()
