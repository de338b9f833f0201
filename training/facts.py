"""What the built-in model knows about maitred: one plain true sentence for each fact, and ways to ask for it.

Source: the house plan, docs/architecture.md. A fact whose sentence stops being true is corrected here first.
"""

from __future__ import annotations

from dataclasses import dataclass

CONCEPT_FORMS = (
    "What is {}?",
    "Explain {}.",
    "Can you explain {}?",
    "What does {} mean?",
    "Tell me about {}.",
    "What do you know about {}?",
    "What's {}?",
    "Describe {}.",
    "What is meant by {}?",
    "Do you know {}?",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """`answer` is the whole reply; `questions` are core wordings, before politeness is added."""

    answer: str
    questions: tuple[str, ...]


def concept(name: str, answer: str) -> Fact:
    """A fact that is the meaning of a noun phrase, asked for by the common forms, with its article or without."""
    bare = name.removeprefix("a ").removeprefix("the ")
    names = (name,) if bare == name else (name, bare)
    return Fact(answer, tuple(form.format(noun) for form in CONCEPT_FORMS for noun in names))


CONCEPTS: tuple[Fact, ...] = (
    concept("maitred", "maitred is an LLM serving system in Python, from a laptop to a Ray cluster."),
    concept("a maitre d'", "A maitre d' decides who is seated next and keeps every table full."),
    concept("a KV cache", "A KV cache keeps the keys and values of past tokens, so they are not computed again."),
    concept(
        "paged KV cache", "A paged KV cache stores keys and values in blocks of equal size, so no memory is wasted."
    ),
    concept("a block", "A block holds the keys and values of a fixed number of tokens."),
    concept("a block table", "A block table lists the blocks that hold the KV cache of one request."),
    concept(
        "the prefix cache", "The prefix cache keeps the blocks of past prompts, so a shared prefix is computed once."
    ),
    concept("a cache salt", "A cache salt keeps the prefix cache of one tenant apart from the others."),
    concept("continuous batching", "Continuous batching lets requests join and leave the batch at every step."),
    concept(
        "chunked prefill", "Chunked prefill splits a long prompt into pieces, so that other requests need not wait."
    ),
    concept("prefill", "Prefill computes the tokens of the prompt."),
    concept("decode", "Decode makes one new token at a time for each request."),
    concept("a step", "A step is one pass of the model over a batch of tokens."),
    concept("a token budget", "The token budget is the most tokens that one step may compute."),
    concept("preemption", "Preemption takes the blocks from one request to give them to another that is more urgent."),
    concept(
        "a request",
        "A request is one prompt with its sampling parameters, and it waits in the queue until it is scheduled.",
    ),
    concept("a tenant", "A tenant is a customer with an API key, a weight, a quota and a priority."),
    concept("a quota", "A quota limits the requests, tokens and concurrency of a tenant."),
    concept("the ledger", "The ledger records the usage of each tenant."),
    concept("the decision log", "The decision log records what the scheduler saw, so that a run can be replayed."),
    concept("the scheduler", "The scheduler decides which requests run in the next step."),
    concept("the executor", "The executor runs the model on the plan of the scheduler and samples the tokens."),
    concept("a replica", "A replica is one engine that serves requests."),
    concept("the router", "The router filters, scores and picks the replica for a request."),
    concept("the simulator", "The simulator runs the real scheduler with a cost model in place of the executor."),
    concept(
        "speculative decoding",
        "Speculative decoding lets a small draft propose tokens that the model checks in one step.",
    ),
    concept("a draft model", "A draft model is a small model that proposes tokens for speculative decoding."),
    concept("n-gram speculation", "N-gram speculation proposes tokens by finding the last words earlier in the text."),
    concept("FCFS", "FCFS means first come, first served."),
    concept("SJF", "SJF means shortest job first."),
    concept("SRPT", "SRPT means shortest remaining processing time: the request with the least work left runs first."),
    concept("round robin", "Round robin gives each request a quantum of tokens in turn."),
    concept("MLFQ", "MLFQ is a multi-level feedback queue: a request sinks to a lower level as it uses more tokens."),
    concept("the deadline policy", "The deadline policy runs the request whose deadline is nearest."),
    concept("fair share", "Fair share gives each tenant service in proportion to its weight."),
    concept("VTC", "VTC is a virtual token counter: the tenant with the least service runs first."),
    concept("prefix-first", "Prefix-first runs the requests whose prompt is already in the prefix cache."),
    concept("ageing", "Ageing raises the priority of a request that waits, so that it never starves."),
    concept("starvation", "Starvation is when a request waits forever because others are always served first."),
    concept("TTFT", "TTFT is the time to first token."),
    concept("TPOT", "TPOT is the time per output token after the first."),
    concept("greedy decoding", "Greedy decoding always takes the most likely token."),
    concept("the chat template", "The chat template turns a list of messages into one prompt."),
    concept("a stop string", "A stop string ends the answer as soon as it appears in the text."),
    concept("streaming", "Streaming sends each token to the client as soon as it is made."),
    concept("quantisation", "Quantisation stores weights in fewer bits, so that they need less memory."),
    concept("tensor parallelism", "Tensor parallelism splits each weight matrix over several devices."),
    concept(
        "disaggregated serving",
        "Disaggregated serving runs prefill and decode on different replicas and moves the KV cache.",
    ),
    concept("structured output", "Structured output makes the answer follow a JSON schema or a grammar."),
    concept("dynamic batching", "Dynamic batching groups small tensor requests into one larger batch."),
    concept("a decoder spec", "A decoder spec describes a model as data: its norm, rope, attention and gating."),
    concept("the cost model", "The cost model predicts how long a step will take."),
    concept("the built-in model", "The built-in model is a small Llama that knows a restaurant and maitred."),
)

DIRECT: tuple[Fact, ...] = (
    Fact(
        "The scheduling policies are FCFS, priority, SJF, SRPT, round robin, MLFQ, deadline, fair share "
        "and prefix-first.",
        (
            "Which scheduling policies are there?",
            "What scheduling policies does maitred have?",
            "List the scheduling policies.",
            "Which policies can I choose?",
        ),
    ),
    Fact(
        "Run make serve: it takes a bare checkout to a served chat.",
        (
            "How do I start maitred?",
            "How do I serve the built-in model?",
            "How can I start the server?",
            "Which command starts a chat?",
            "What does make serve do?",
        ),
    ),
    Fact(
        "Run make test: it takes a bare checkout to a green suite.",
        (
            "How do I run the tests?",
            "How can I test maitred?",
            "Which command runs the tests?",
            "What does make test do?",
        ),
    ),
    Fact(
        "Run make check: it formats, lints and type checks the code.",
        ("How do I check the code?", "Which command runs the linters?", "What does make check do?"),
    ),
    Fact(
        "Run make bench to measure the speed.",
        ("How do I run the benchmarks?", "Which command measures the speed?", "How can I benchmark maitred?"),
    ),
    Fact(
        "Yes, maitred speaks the OpenAI API.",
        (
            "Does maitred speak the OpenAI API?",
            "Can I use the OpenAI client?",
            "Is maitred compatible with OpenAI?",
            "Does it work with the OpenAI library?",
        ),
    ),
    Fact(
        "maitred serves the OpenAI API, the Anthropic API and the KServe v2 API.",
        ("Which APIs does maitred serve?", "Which protocols does maitred speak?", "What APIs are supported?"),
    ),
    Fact(
        "No, the CPU engine needs no PyTorch: it uses numpy and a small C++ library.",
        (
            "Does maitred need PyTorch?",
            "Do I need PyTorch on the CPU?",
            "Must I install PyTorch?",
            "Is PyTorch required?",
        ),
    ),
    Fact(
        "No, maitred runs on a laptop without a GPU.",
        ("Do I need a GPU?", "Does maitred need a GPU?", "Is a GPU required?", "Must I have a GPU?"),
    ),
    Fact(
        "maitred is written in Python, with kernels in C++.",
        ("Which language is maitred written in?", "What is maitred written in?", "In which language is the code?"),
    ),
    Fact(
        "Yes, greedy output is the same alone or in a batch.",
        (
            "Is the answer the same under load?",
            "Does batching change the answer?",
            "Is greedy output the same in a batch?",
            "Do I get the same answer whatever the load?",
        ),
    ),
    Fact(
        "One scheduler drives the live engine, the simulator and the replay.",
        (
            "How many schedulers are there?",
            "What drives the simulator?",
            "Do the engine and the simulator share a scheduler?",
        ),
    ),
    Fact(
        "It reads safetensors and GGUF files, and GPTQ and AWQ weights.",
        (
            "Which checkpoint formats can it read?",
            "What weight formats are supported?",
            "Which model files can maitred load?",
        ),
    ),
    Fact(
        "Ray runs many replicas on a cluster.",
        ("What is Ray used for?", "Why does maitred use Ray?", "How does maitred run on a cluster?"),
    ),
    Fact(
        "I am the built-in model of maitred, and I serve this small restaurant.",
        ("Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Which model are you?"),
    ),
    Fact(
        "I can take your order, add up the bill and answer questions about maitred.",
        ("What can you do?", "How can you help me?", "What do you know?", "What can I ask you?", "Can you help me?"),
    ),
    Fact(
        "The engine knows the tenant, so each request has a weight, a quota and a priority.",
        (
            "How does maitred know who is asking?",
            "Does the engine know the tenant?",
            "Why does the engine know who is asking?",
        ),
    ),
)

FACTS: tuple[Fact, ...] = CONCEPTS + DIRECT
