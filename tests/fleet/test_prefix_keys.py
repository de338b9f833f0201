"""Prefix keys: equal beginnings have equal keys, whatever follows, and unlike salts, models and tools have none."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from maitred.fleet import stored_keys
from maitred.fleet.prefix_index import ForeignHistory, Hit, PrefixIndex
from maitred.fleet.prefix_keys import MAX_KEYS, NO_KEYS, PIECE_BYTES, RoutedBody, prefix_keys, read_asked, read_body
from maitred.fleet.stored_keys import KeyBlock, StoredKeys, TokenLengths, ends_of_tokens, tokens_of_keys
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text.chat_template import ChatTemplate
from maitred.text.folder import read_chat_template
from maitred.text.parts import FolderText, TextParts
from tests.fakes_api import TEMPLATE, byte_tokenizer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def test_what_the_router_needs_is_read_and_what_is_wrong_as_if_it_were_not_there():
    read = read_body(
        b'{"model": "m", "stream": true, "max_tokens": 7, "messages": [ {"a": 1} ], "logit_bias": {"1": 2}}'
    )
    assert (read.model, read.stream, read.max_tokens) == ("m", True, 7)
    assert bytes(read.messages) == b'[ {"a": 1} ]'  # as it stands
    assert read_body(b'{"max_tokens": 20.0, "n": 2.5}') == RoutedBody(max_tokens=20)
    read = read_body(b'{"model": "m", "n": "many", "messages": [1], "user": 5, "temperature": 1}')
    assert (read.model, read.n, read.user, read.temperature) == ("m", None, None, 1.0)
    assert bytes(read.messages) == b"[1]"
    prefix_keys(read_body(b'{"model": "\\ud800", "prompt": "\\ud800"}'))


def test_tritons_generate_is_read_by_the_names_of_completions():
    body = (
        b'{"text_input": "Hi", "parameters": {"max_tokens": 9, "n": 3, "stream": true}, "n": 2,'
        b' "sampling_parameters": "{\\"temperature\\": \\"0.5\\", \\"n\\": 4}"}'
    )
    read = read_asked("/v2/models/a/b/versions/1/generate", body)
    assert (read.model, read.stream, read.max_tokens, read.n, read.temperature) == ("a/b", False, 9, 4, 0.5)
    assert prefix_keys(read).keys == prefix_keys(read_body(b'{"model": "a/b", "prompt": "Hi"}')).keys
    assert read_asked("/v2/models/m/generate_stream", b'{"text_input": "Hi"}').stream
    assert read_asked("/v2/models/m/infer", body) == read_body(body)
    for wrong in (b"", b"[]", b'{"parameters": 5, "sampling_parameters": "{"}'):
        assert read_asked("/v2/models/m/generate", wrong) == RoutedBody(model="m", stream=False)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"model": "\xff"}', b"[" * 100_000, b'{"messages": ' + b"[" * 100_000]
)
def test_what_is_no_object_is_an_empty_request(body):
    assert read_body(body) == RoutedBody()


@pytest.mark.parametrize("messages", [b'"x"', b"{}", b"[1, 2]", b"3", b"null", b"[" + b"[]," * 70_000 + b"[]]"])
def test_messages_that_are_no_list_of_messages_have_keys_too(messages):
    assert prefix_keys(read_body(b'{"messages": ' + messages + b"}")).keys


@given(
    st.binary() | st.dictionaries(st.sampled_from(RoutedBody.__struct_fields__), JSON).map(json.dumps).map(str.encode)
)
def test_no_body_breaks_it(body):
    prefix_keys(read_body(body))


def test_a_number_that_takes_long_is_read_once_however_often_a_large_body_has_it():
    """400,000 of these would take 3 s, in which a router does nothing else."""
    body = b'{"n": 2, "prompt": "a", ' + b'"temperature":1e300,' * 400_000 + b'"temperature": 0.5}'
    began = time.thread_time()
    read = read_body(body)
    assert time.thread_time() - began < 0.5
    assert (read.n, read.temperature, bytes(read.prompt)) == (2, 0.5, b'"a"')


def keys_of(messages, salt="", **fields):
    return prefix_keys(read_body(json.dumps({"model": "m", "messages": messages, **fields}).encode()), salt)


def user(text):
    return {"role": "user", "content": text}


def shared(left, right):
    """How many of the first keys are the same."""
    return next(
        (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right))
    )


@given(st.lists(st.text(max_size=900), min_size=1, max_size=6), st.text(max_size=900))
def test_a_conversation_that_grows_keeps_all_its_keys(texts, more):
    before = keys_of([user(text) for text in texts])
    after = keys_of([user(text) for text in [*texts, more]])
    assert after.keys[: len(before.keys)] == before.keys
    assert len(after.keys) > len(before.keys)


@given(st.lists(st.binary(max_size=700), min_size=1, max_size=4))
def test_ends_are_bytes_of_the_messages(texts):
    messages = [user(text.decode("latin-1")) for text in texts]
    found = keys_of(messages)
    assert found.ends[-1] == sum(len(json.dumps(message)) for message in messages)
    assert all(0 < end - start <= PIECE_BYTES for start, end in zip((0, *found.ends), found.ends, strict=False))
    assert len(found.keys) == len(found.ends)


@pytest.mark.parametrize("other", [
    {"salt": "b"}, {"model": "n"}, {"tools": [{"type": "function"}]},
    {"chat_template_kwargs": {"enable_thinking": False}}, {"cache_salt": "x"},
])  # fmt: skip
def test_who_differs_in_what_comes_before_the_messages_shares_no_key(other):
    messages = [user("hello"), user("again")]
    assert not set(keys_of(messages, salt="a").keys) & set(keys_of(messages, **{"salt": "a", **other}).keys)


def test_keys_are_of_the_prompt_alone_every_so_many_bytes_and_at_most_so_many():
    assert keys_of([user("hello")], temperature=1, n=3) == keys_of([user("hello")], stream=True)
    found = prefix_keys(read_body(b'{"prompt": "' + b"x" * 1000 + b'"}'))
    assert found.ends == (256, 512, 768, 1002)
    one = keys_of([user("x" * 2 * MAX_KEYS * PIECE_BYTES)])
    many = keys_of([user("x")] * (MAX_KEYS + 1))
    assert len(one.keys) == len(many.keys) == len(one.ends) == MAX_KEYS
    assert prefix_keys(read_body(b'{"input": "x"}')) == NO_KEYS
    left, right = user("a" * 1000), user("a" * 600 + "b" * 400)
    num_shared = shared(keys_of([left]).keys, keys_of([right]).keys)
    assert num_shared == (len('{"role": "user", "content": "') + 600) // PIECE_BYTES


@pytest.mark.parametrize("first", ["x" * 1000, 'a "quoted" text, [not] a list', list(range(500))])
def test_several_prompts_have_the_keys_of_the_first(first):
    def keys(prompt):
        return prefix_keys(read_body(json.dumps({"prompt": prompt}).encode()))

    assert keys([first, "another"]) == keys([first]) == keys(first) != NO_KEYS
    assert keys(["x"] * 70_000) == NO_KEYS, "too many to be told apart"


NUM_REPLICAS = 4
CHAINS = [
    [depth if depth < fork else 100 * tail + depth for depth in range(12)]
    for tail, fork in enumerate([3, 3, 7, 1, 0], 1)
]


def walked(caches, keys, mask):
    """The slow obvious way: by replica, how many of the first keys are there."""
    depths = {}
    for bit, cache in enumerate(caches):
        if mask >> bit & 1:
            depth = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
            depths[depth] = depths.get(depth, 0) | 1 << bit
    return [Hit(depth, bits) for depth, bits in sorted(depths.items(), reverse=True) if depth]


class Fleet(RuleBasedStateMachine):
    """Replicas whose caches hold chains from their beginnings, and tell of what comes and goes."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.caches = [set() for _ in range(NUM_REPLICAS)]

    @rule(bit=st.integers(0, NUM_REPLICAS - 1), chain=st.sampled_from(CHAINS), depth=st.integers(0, 12))
    def stores(self, bit, chain, depth):
        self.caches[bit] |= set(chain[:depth])
        self.index.stored(bit, chain[:depth])

    @rule(bit=st.integers(0, NUM_REPLICAS - 1), chain=st.sampled_from(CHAINS), depth=st.integers(0, 12))
    def evicts(self, bit, chain, depth):
        gone = set(chain[depth:])
        gone |= {key for other in CHAINS for i, key in enumerate(other) if gone & set(other[: i + 1])}
        self.caches[bit] -= gone
        self.index.removed(bit, gone)

    @rule(bit=st.integers(0, NUM_REPLICAS - 1))
    def breaks(self, bit):
        self.caches[bit].clear()
        self.index.forgot(bit)

    @rule(chain=st.sampled_from(CHAINS), mask=st.integers(0, 2**NUM_REPLICAS - 1))
    def is_asked(self, chain, mask):
        assert self.index.hits(chain, mask) == walked(self.caches, chain, mask)

    @invariant()
    def holds_what_the_caches_hold(self):
        self.index.check_invariants()
        assert self.index.num_keys == len(set().union(*self.caches))
        assert [self.index.num_keys_of(bit) for bit in range(NUM_REPLICAS)] == [len(each) for each in self.caches]


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(0, 40))
def test_any_depths_are_found(depths, num_keys):
    index = PrefixIndex()
    for bit, depth in enumerate(depths):
        index.stored(bit, range(depth))
    caches = [set(range(depth)) for depth in depths]
    assert index.hits(range(num_keys), 2**20 - 1) == walked(caches, range(num_keys), 2**20 - 1)


def test_what_is_removed_twice_or_was_never_there_is_no_matter():
    index = PrefixIndex()
    index.stored(0, [1, 2])
    index.removed(0, [2, 3])
    index.removed(1, [1])
    index.removed(0, [2])
    assert index.hits([1, 2], 0b11) == [Hit(1, 0b1)]
    index.check_invariants()


def make_history(max_keys=100):
    index = PrefixIndex()
    return index, ForeignHistory(index, max_keys)


def chain(name, num_keys=10):
    return [1000 * name + depth for depth in range(num_keys)]


def test_what_was_sent_is_found_until_forgotten_least_recent_first_and_from_its_end():
    index, history = make_history()
    history.sent(1, chain(1))
    assert index.hits([*chain(1), 5], 0b11) == [Hit(10, 0b10)]
    index, history = make_history()
    history.sent(0, chain(1))
    history.sent(1, chain(1))
    history.forgot(0)
    assert index.hits(chain(1), 0b11) == [Hit(10, 0b10)]
    index, history = make_history(max_keys=25)
    for name in (1, 2, 1, 3):
        history.sent(0, chain(name))
    assert [index.hits(chain(name), 1) for name in (1, 2, 3)] == [[Hit(10, 1)], [Hit(5, 1)], [Hit(10, 1)]]


def test_a_miss_that_usage_tells_makes_older_ones_forgotten_and_the_server_smaller():
    index, history = make_history()
    for name in (1, 2, 3):
        history.sent(0, chain(name))
    expected = history.sent(0, chain(2))
    history.told(0, expected, cached_tokens=0, prompt_tokens=640)
    assert [len(index.hits(chain(name), 1)) for name in (1, 2, 3)] == [0, 1, 1]  # 2 is there again
    index, history = make_history()
    for name in range(8):
        history.sent(0, chain(name))
    history.told(0, history.sent(0, chain(1)), cached_tokens=0, prompt_tokens=640)
    for name in range(20, 30):
        history.sent(0, chain(name))
    assert index.num_keys_of(0) < 80
    index, history = make_history()
    history.sent(0, chain(1))
    history.sent(0, chain(2))
    history.told(0, history.sent(0, chain(2)), cached_tokens=600, prompt_tokens=640)
    assert index.num_keys == 20


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 12), st.integers(0, 12)), max_size=60),
    st.integers(1, 40),
)
def test_a_server_never_has_a_key_without_those_before_it_nor_more_than_its_share(requests, max_keys):
    index, history = make_history(max_keys)
    for bit, name, num_keys, num_cached in requests:
        keys = [0, 1, 2, *chain(name + 1, num_keys)]
        expected = history.sent(bit, keys)
        history.told(bit, expected, cached_tokens=min(num_cached, len(keys)), prompt_tokens=len(keys))
        index.check_invariants()
        assert index.num_keys_of(bit) <= max_keys
        for known in range(1, 7):
            keys = [0, 1, 2, *chain(known, 12)]
            held = [key in index._keys.get(bit, ()) for key in keys]
            assert held == sorted(held, reverse=True)


BYTES = TextParts(byte_tokenizer(), ChatTemplate(TEMPLATE, added_tokens=byte_tokenizer().added_tokens))
BUILTIN = FolderText(BUILTIN_FOLDER, read_chat_template(BUILTIN_FOLDER)).read()
TRIMS = TextParts(
    byte_tokenizer(), ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}")
)
TEXT = st.text(alphabet=st.sampled_from('ab \n\t"\\é漢😀.'), max_size=700)


def counted(text, messages, *, ensure_ascii=True):
    """(keys, tokens of each, all tokens) of a chat."""
    body = read_body(json.dumps({"model": "m", "messages": messages}, ensure_ascii=ensure_ascii).encode())
    prompt = text.chat_template.render(messages)
    return counted_prompt(text, body, prompt)


def counted_prompt(text, body, prompt):
    ids = text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    found = prefix_keys(body)
    lengths = TokenLengths(text.tokenizer.token_bytes)
    return found.keys, tokens_of_keys(body, found, prompt, lambda: ends_of_tokens(prompt, ids, lengths)), ids


@pytest.mark.parametrize("text", [BYTES, BUILTIN, TRIMS], ids=["bytes", "builtin", "trims"])
@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(0, 700), TEXT, st.booleans())
def test_prompts_with_a_key_in_common_have_its_tokens_in_common(text, contents, at, more, ensure_ascii):
    other = [*contents[:-1], contents[-1][:at] + more]
    keys, counts, ids = counted(text, [user(each) for each in contents], ensure_ascii=ensure_ascii)
    others, _, other_ids = counted(text, [user(each) for each in other], ensure_ascii=ensure_ascii)
    assert len(counts) == len(keys)
    assert counts == sorted(counts)
    for key, count in zip(keys, counts, strict=True):
        if key in others and key != keys[-1]:
            slack = 3 if text is BUILTIN else 0  # of the word that the cut goes through
            assert ids[: max(0, count - slack)] == other_ids[: max(0, count - slack)]


@pytest.mark.parametrize("text", [BYTES, BUILTIN], ids=["bytes", "builtin"])
@pytest.mark.parametrize("content", ["word " * 500, 'def f():\n\t"""x"""\n' * 60, "é漢😀" * 200])
def test_hardly_a_token_is_lost_at_the_end_of_a_message(text, content):
    """What the template puts behind the last content, and a piece's last token, are all that may be lacking."""
    _, counts, ids = counted(text, [user(content), user(content)])
    end_of_turn = len(text.tokenizer.encode(text.chat_template.render([user("")])))
    assert len(ids) - counts[-1] <= end_of_turn + 1
    lost = max(after - before for before, after in pairwise(counts))
    assert lost <= 256 + 2 * end_of_turn


def test_what_the_template_makes_unrecognisable_is_shared_out():
    upper = TextParts(byte_tokenizer(), ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}"))
    keys, counts, ids = counted(upper, [user("ab" * 500), user("cd" * 500)])
    assert len(counts) == len(keys)
    assert counts == sorted(counts)
    assert abs(counts[len(counts) // 2 - 1] - 1000) < 40
    assert abs(counts[-1] - len(ids)) < 3


def test_a_message_between_two_that_are_found_ends_between_them():
    shown = "{% if m.role == 'assistant' %}{{ m.content | length }}{% else %}{{ m.content }}{% endif %}"
    template = "{% for m in messages %}<" + shown + ">{% endfor %}"
    text = TextParts(byte_tokenizer(), ChatTemplate(template))
    chat = [user("one two three"), {"role": "assistant", "content": "hidden"}, user("four five six")]
    _, counts, _ = counted(text, chat)
    assert counts[0] == len("<one two three")
    assert counts[0] <= counts[1] <= len("<one two three><6><")
    assert counts[2] == len("<one two three><6><four five six")


def test_contents_in_parts_text_prompts_and_token_ids_are_found():
    chat = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}, user("3")]
    _, counts, _ = counted(BYTES, chat)
    assert counts == [len("<user>one\ntwo"), len("<user>one\ntwo") + len("</s>") - 3 + len("<user>3")]
    prompt = "a\nb" * 300
    _, counts, ids = counted_prompt(BYTES, read_body(json.dumps({"prompt": prompt}).encode()), prompt)
    assert counts[-1] == len(ids) == 900
    assert counts[0] == 190  # of 255 bytes of JSON every fourth escapes; the last token could be another
    ids = list(range(100, 400))
    _, counts, _ = counted_prompt(BYTES, read_body(json.dumps({"prompt": ids}).encode()), ids)
    assert (counts[0], counts[-1]) == (51, 299)
    ids = list(range(100, 400))
    body = read_body(json.dumps({"prompt": [ids, [3, 4]]}).encode())
    assert tokens_of_keys(body, prefix_keys(body), ids, list) == [51, 102, 153, 204, 256, 299]


def test_tokens_put_before_the_prompt_have_no_bytes_and_too_many_bytes_are_scaled():
    assert ends_of_tokens("abc", [9, 1, 2], {9: 3, 1: 1, 2: 2}) == [0, 1, 3]
    assert ends_of_tokens("abcd", [1, 1, 1, 1], {1: 2}) == [1, 2, 3, 4]


BLOCKS = [b"a", b"b", b"c", b"d", b"e", b"f"]
# chains of a trie: a key is its path, so that equal keys have equal beginnings
PATHS_OF_KEYS = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 4), (0, 5, 6), (7, 8)]


def told(changes, known):
    stored, removed = changes.take(10**6)
    assert known.isdisjoint(stored)
    assert known.issuperset(removed)
    return (known - set(removed)) | set(stored)


class Replica(RuleBasedStateMachine):
    """Blocks come and go, requests tell which key ends where, routers come and go."""

    def __init__(self):
        super().__init__()
        self.keys = StoredKeys()
        self.cached = set()
        self.routers = []

    @rule(chain=st.sampled_from(PATHS_OF_KEYS), ends=st.lists(st.sampled_from([None, *BLOCKS]), min_size=4, max_size=4))
    def a_request_comes(self, chain, ends):
        self.keys.note([KeyBlock(key, block) for key, block in zip(chain, ends, strict=False)])

    @rule(stored=st.sets(st.sampled_from(BLOCKS)), removed=st.sets(st.sampled_from(BLOCKS)))
    def blocks_change(self, stored, removed):
        removed = (removed & self.cached) - stored
        stored = stored - self.cached
        self.keys.blocks_changed(stored, removed)
        self.cached = (self.cached - removed) | stored

    @rule()
    def the_engine_dies(self):
        self.keys.forgot()
        self.cached.clear()

    @rule()
    def a_router_comes(self):
        self.routers.append((self.keys.listen(), set()))

    @rule()
    def a_router_leaves(self):
        if self.routers:
            self.keys.leave(self.routers.pop(0)[0])

    @invariant()
    def every_router_knows_what_is_stored(self):
        self.keys.check_invariants()
        self.routers = [(changes, told(changes, known)) for changes, known in self.routers]
        assert all(known == self.keys.stored for _, known in self.routers)

    @invariant()
    def who_has_a_key_has_those_before_it(self):
        for chain in PATHS_OF_KEYS:
            held = [key in self.keys.stored for key in chain]
            assert held == sorted(held, reverse=True)


TestReplica = Replica.TestCase
TestReplica.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_key_is_told_when_its_block_is_there_and_with_those_behind_it():
    keys = StoredKeys()
    keys.blocks_changed([b"a"], [])
    keys.note([KeyBlock(1, b"a"), KeyBlock(2, b"b")])
    assert keys.stored == {1}
    keys.blocks_changed([b"b"], [])
    assert keys.stored == {1, 2}
    keys.blocks_changed([], [b"b"])
    assert keys.stored == {1}
    keys = StoredKeys()
    keys.note([KeyBlock(1, None), KeyBlock(2, b"a")])
    assert keys.stored == set()
    keys.blocks_changed([b"a"], [])
    assert keys.stored == {1, 2}
    keys = StoredKeys()
    keys.note([KeyBlock(1, b"a")])
    for stored, removed in (([b"a"], []), ([], [b"a"]), ([b"a"], [])):
        keys.blocks_changed(stored, removed)
    assert keys.stored == {1}


def test_memory_is_bounded_however_many_forms_a_prompt_has(monkeypatch):
    monkeypatch.setattr(stored_keys, "MAX_AWAITED", 20)
    keys = StoredKeys()
    keys.blocks_changed([b"a", b"b"], [])
    for form in range(1000):
        keys.note([KeyBlock(10 * form + 1, b"a"), KeyBlock(10 * form + 2, b"b"), KeyBlock(10 * form + 3, b"never")])
    keys.check_invariants()
    assert len(keys._keys) < 20 + 3 * 2 * stored_keys.MAX_PER_BLOCK
    assert len(keys._by_block) < 4
