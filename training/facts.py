"""What the built-in model knows about maitred: one plain true sentence for each fact, and ways to ask for it.

What a sentence says that maitred has, `shown_by` names, and a test holds it against the tree. A concept without it is
a definition of the field, and says nothing of maitred.
"""

from __future__ import annotations

from dataclasses import dataclass

POLICY_NAMES = ("fcfs", "priority", "interactive", "sjf", "srpt", "rr", "mlfq", "edf", "least_slack", "vtc", "lpm")
FAMILY_NAMES = ("Gemma2", "Gemma3", "Granite", "Llama", "Mistral", "Olmo2", "Phi3", "Qwen2", "Qwen3", "SmolLM3")
"""Before `ForCausalLM`."""

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
    """`answer` is the whole reply; `questions` are core wordings, before politeness is added.

    `shown_by` has references into the tree, `kind:name`; `tests/training/test_facts.py` knows the kinds.
    """

    answer: str
    questions: tuple[str, ...]
    shown_by: tuple[str, ...] = ()


def concept(name: str, answer: str, *shown_by: str) -> Fact:
    """A fact that is the meaning of a noun phrase, asked for by the common forms, with its article or without."""
    bare = name.removeprefix("a ").removeprefix("the ")
    names = (name,) if bare == name else (name, bare)
    return Fact(answer, tuple(form.format(noun) for form in CONCEPT_FORMS for noun in names), shown_by)


CONCEPTS: tuple[Fact, ...] = (
    concept(
        "maitred",
        "maitred is an LLM serving system in Python, from a laptop to a fleet.",
        "command:serve",
        "command:route",
    ),
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
    concept(
        "a cache salt",
        "A cache salt keeps the prefix cache of one tenant apart from the others.",
        "asks:cache_salt",
    ),
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
    concept(
        "a tenant",
        "A tenant is a customer with an API key, a weight, a quota and a priority.",
        "field:maitred.tenancy.tenant.Tenant.weight",
        "field:maitred.tenancy.tenant.Tenant.limits",
        "field:maitred.tenancy.tenant.Tenant.default_priority",
        "command:keys",
    ),
    concept("a quota", "A quota limits the requests, tokens and concurrency of a tenant."),
    concept("the ledger", "The ledger records the usage of each tenant.", "module:maitred.storage.ledger"),
    concept(
        "the decision log",
        "The decision log records what the scheduler saw, so that a run can be replayed.",
        "module:maitred.decisions.log",
        "command:replay",
    ),
    concept("the scheduler", "The scheduler decides which requests run in the next step."),
    concept("the executor", "The executor runs the model on the plan of the scheduler and samples the tokens."),
    concept("a replica", "A replica is one engine that serves requests."),
    concept(
        "the router",
        "The router filters, scores and picks the replica for a request.",
        "command:route",
        "module:maitred.fleet.balance",
    ),
    concept(
        "the simulator",
        "The simulator runs the real scheduler with a cost model in place of the executor.",
        "command:simulate",
        "module:maitred.sim.engine",
    ),
    concept(
        "speculative decoding",
        "Speculative decoding lets a small draft propose tokens that the model checks in one step.",
    ),
    concept("a draft model", "A draft model is a small model that proposes tokens for speculative decoding."),
    concept("FCFS", "FCFS means first come, first served.", "policy:fcfs"),
    concept("SJF", "SJF means shortest job first.", "policy:sjf"),
    concept(
        "SRPT",
        "SRPT means shortest remaining processing time: the request with the least work left runs first.",
        "policy:srpt",
    ),
    concept("round robin", "Round robin gives each request a quantum of tokens in turn.", "policy:rr"),
    concept(
        "MLFQ",
        "MLFQ is a multi-level feedback queue: a request sinks to a lower level as it uses more tokens.",
        "policy:mlfq",
    ),
    concept(
        "EDF", "EDF means earliest deadline first: the request whose deadline is nearest runs first.", "policy:edf"
    ),
    concept(
        "least slack",
        "Least slack runs the request that can wait the least and still be in time.",
        "policy:least_slack",
    ),
    concept("fair share", "Fair share gives each tenant service in proportion to its weight.", "policy:vtc"),
    concept("VTC", "VTC is a virtual token counter: the tenant with the least service runs first.", "policy:vtc"),
    concept(
        "LPM",
        "LPM means longest prefix match: the request with the most of its prompt in the cache runs first.",
        "policy:lpm",
    ),
    concept("ageing", "Ageing raises the priority of a request that waits, so that it never starves."),
    concept("starvation", "Starvation is when a request waits forever because others are always served first."),
    concept("TTFT", "TTFT is the time to first token."),
    concept("TPOT", "TPOT is the time per output token after the first."),
    concept("greedy decoding", "Greedy decoding always takes the most likely token."),
    concept(
        "the chat template",
        "The chat template turns a list of messages into one prompt.",
        "module:maitred.text.chat_template",
    ),
    concept("a stop string", "A stop string ends the answer as soon as it appears in the text."),
    concept("streaming", "Streaming sends each token to the client as soon as it is made."),
    concept("quantisation", "Quantisation stores weights in fewer bits, so that they need less memory."),
    concept(
        "structured output",
        "Structured output makes the answer follow a JSON schema or a grammar.",
        "asks:response_format",
        "asks:structured_outputs",
    ),
    concept("a tool call", "A tool call is a function that the model asks the client to run.", "asks:tools"),
    concept("reasoning", "Reasoning is what a model thinks before it answers.", "asks:reasoning_effort"),
    concept("a grammar", "A grammar says which texts an answer may be, token by token.", "asks:structured_outputs"),
    concept("failover", "Failover sends a request to another replica when its own fails.", "command:route"),
    concept("an API key", "An API key tells the server which tenant is asking.", "command:keys"),
    concept(
        "a decoder spec",
        "A decoder spec describes a model as data: its norm, rope, attention and gating.",
        "module:maitred.model.spec",
    ),
    concept("the cost model", "The cost model predicts how long a step will take.", "module:maitred.core.cost_model"),
    concept(
        "the built-in model",
        "The built-in model is a small Llama that knows a restaurant and maitred.",
        "file:src/maitred/builtin/maitred-mini/config.json",
    ),
)

DIRECT: tuple[Fact, ...] = (
    Fact(
        "The scheduling policies are fcfs, priority, interactive, sjf, srpt, rr, mlfq, edf, least_slack, vtc and lpm.",
        (
            "Which scheduling policies are there?",
            "What scheduling policies does maitred have?",
            "List the scheduling policies.",
            "Which policies can I choose?",
        ),
        tuple(f"policy:{name}" for name in POLICY_NAMES),
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
        ("make:serve",),
    ),
    Fact(
        "Run make test: it takes a bare checkout to a green suite.",
        (
            "How do I run the tests?",
            "How can I test maitred?",
            "Which command runs the tests?",
            "What does make test do?",
        ),
        ("make:test",),
    ),
    Fact(
        "Run make check: it formats, lints and type checks the code.",
        ("How do I check the code?", "Which command runs the linters?", "What does make check do?"),
        ("make:check",),
    ),
    Fact(
        "Run make bench to measure the speed.",
        ("How do I run the benchmarks?", "Which command measures the speed?", "How can I benchmark maitred?"),
        ("make:bench",),
    ),
    Fact(
        "Yes, maitred speaks the OpenAI API.",
        (
            "Does maitred speak the OpenAI API?",
            "Can I use the OpenAI client?",
            "Is maitred compatible with OpenAI?",
            "Does it work with the OpenAI library?",
        ),
        ("route:/v1/chat/completions", "route:/v1/completions"),
    ),
    Fact(
        "maitred serves the OpenAI API: chat completions, completions and models.",
        ("Which APIs does maitred serve?", "Which protocols does maitred speak?", "What APIs are supported?"),
        ("route:/v1/chat/completions", "route:/v1/completions", "route:/v1/models"),
    ),
    Fact(
        "No, the CPU engine needs no PyTorch: it uses numpy and a small C++ library.",
        (
            "Does maitred need PyTorch?",
            "Do I need PyTorch on the CPU?",
            "Must I install PyTorch?",
            "Is PyTorch required?",
        ),
        ("optional:torch",),
    ),
    Fact(
        "No, maitred runs on a laptop without a GPU.",
        ("Do I need a GPU?", "Does maitred need a GPU?", "Is a GPU required?", "Must I have a GPU?"),
        ("module:maitred.executor.native",),
    ),
    Fact(
        "maitred is written in Python, with kernels in C++.",
        ("Which language is maitred written in?", "What is maitred written in?", "In which language is the code?"),
        ("file:src/maitred/kernels/csrc/module.cpp",),
    ),
    Fact(
        "Yes, greedy output is the same alone or in a batch.",
        (
            "Is the answer the same under load?",
            "Does batching change the answer?",
            "Is greedy output the same in a batch?",
            "Do I get the same answer whatever the load?",
        ),
        ("file:tests/executor/test_native_identity.py",),
    ),
    Fact(
        "One scheduler drives the live engine, the simulator and the replay.",
        (
            "How many schedulers are there?",
            "What drives the simulator?",
            "Do the engine and the simulator share a scheduler?",
        ),
        ("imports:maitred.sim.engine maitred.scheduler.engine_core", "module:maitred.decisions.replay"),
    ),
    Fact(
        "It reads safetensors files in a folder of Hugging Face's layout.",
        (
            "Which checkpoint formats can it read?",
            "What weight formats are supported?",
            "Which model files can maitred load?",
        ),
        ("module:maitred.model.safetensors_file", "flag:serve --model"),
    ),
    Fact(
        "maitred serves Gemma 2 and 3, Granite, Llama, Mistral, OLMo 2, Phi-3, Qwen 2 and 3 and SmolLM3.",
        ("Which models can maitred serve?", "Which model families are supported?", "What models does it run?"),
        tuple(f"family:{name}ForCausalLM" for name in FAMILY_NAMES),
    ),
    Fact(
        "Run maitred route --launch ray: it starts replicas on the nodes of a Ray cluster.",
        ("What is Ray used for?", "Why does maitred use Ray?", "How does maitred run on a cluster?"),
        ("command:route", "flag:route --launch", "launcher:ray"),
    ),
    Fact(
        "Run maitred route: it gives many servers one address, with failover and one queue.",
        (
            "How do I serve with many replicas?",
            "What does maitred route do?",
            "How do I put several servers behind one address?",
            "Which command starts the router?",
        ),
        ("command:route",),
    ),
    Fact(
        "Run maitred chat to talk to a model in the terminal.",
        ("How do I chat in the terminal?", "What does maitred chat do?", "Can I talk to a model in the terminal?"),
        ("command:chat",),
    ),
    Fact(
        "Run maitred top to watch slots, queue and KV cache in the terminal.",
        ("How do I watch the server?", "What does maitred top do?", "How can I see how full the server is?"),
        ("command:top",),
    ),
    Fact(
        "Run maitred simulate to compare policies without a model.",
        ("How do I compare policies?", "What does maitred simulate do?", "Which policy is best for me?"),
        ("command:simulate",),
    ),
    Fact(
        "Run maitred why: it tells what a request waited for.",
        ("Why did my request wait?", "What does maitred why do?", "How do I find out what a request waited for?"),
        ("command:why",),
    ),
    Fact(
        "Run maitred keys to make and revoke the API keys of tenants.",
        ("How do I make an API key?", "What does maitred keys do?", "How can I revoke a key?"),
        ("command:keys",),
    ),
    Fact(
        "Run maitred bench serve to load a server and measure it.",
        ("How do I load a server?", "What does maitred bench serve do?", "How can I measure a running server?"),
        ("command:bench serve",),
    ),
    Fact(
        "Send response_format with a JSON schema, and the answer fits it.",
        (
            "How do I get JSON?",
            "How can I make the answer fit a schema?",
            "Does maitred support JSON schemas?",
            "What is response_format?",
        ),
        ("asks:response_format",),
    ),
    Fact(
        "Send tools with the chat, and the model may call them.",
        ("How do I use tools?", "Can the model call tools?", "Does maitred support tool calls?", "What are tools?"),
        ("asks:tools", "asks:tool_choice"),
    ),
    Fact(
        "GET /metrics gives metrics for Prometheus, and GET /health tells whether the engine lives.",
        ("How do I get metrics?", "Does it speak Prometheus?", "Where are the metrics?", "Is there a health check?"),
        ("route:/metrics", "route:/health"),
    ),
    Fact(
        "I am the built-in model of maitred, and I serve this small restaurant.",
        ("Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Which model are you?"),
        ("file:src/maitred/builtin/maitred-mini/config.json",),
    ),
    Fact(
        "I can take your order, add up the bill and answer questions about maitred.",
        ("What can you do?", "How can you help me?", "What do you know?", "What can I ask you?", "Can you help me?"),
        ("file:training/orders.py",),
    ),
    Fact(
        "The engine knows the tenant, so each request has a weight, a quota and a priority.",
        (
            "How does maitred know who is asking?",
            "Does the engine know the tenant?",
            "Why does the engine know who is asking?",
        ),
        ("field:maitred.tenancy.tenant.Tenant.weight", "field:maitred.tenancy.tenant.Tenant.limits"),
    ),
)

FACTS: tuple[Fact, ...] = CONCEPTS + DIRECT
