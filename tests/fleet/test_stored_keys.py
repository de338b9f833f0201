"""A replica's keys: stored while their block, or that of any key behind them, can be found; told to whoever listens."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from maitred.fleet import stored_keys
from maitred.fleet.prefix_keys import prefix_keys, read_body
from maitred.fleet.stored_keys import KeyBlock, StoredKeys, TokenLengths, ends_of_tokens, tokens_of_keys
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text.chat_template import ChatTemplate
from maitred.text.folder import read_chat_template
from maitred.text.parts import FolderText, TextParts
from tests.fakes_api import TEMPLATE, byte_tokenizer

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


def user(text):
    return {"role": "user", "content": text}


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


def test_contents_in_parts_are_found_too():
    chat = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}, user("3")]
    _, counts, _ = counted(BYTES, chat)
    assert counts == [len("<user>one\ntwo"), len("<user>one\ntwo") + len("</s>") - 3 + len("<user>3")]


def test_a_text_prompt_is_found_at_its_beginning():
    prompt = "a\nb" * 300
    _, counts, ids = counted_prompt(BYTES, read_body(json.dumps({"prompt": prompt}).encode()), prompt)
    assert counts[-1] == len(ids) == 900
    assert counts[0] == 190  # of 255 bytes of JSON every fourth escapes; the last token could be another


def test_a_prompt_of_token_ids_is_counted():
    ids = list(range(100, 400))
    _, counts, _ = counted_prompt(BYTES, read_body(json.dumps({"prompt": ids}).encode()), ids)
    assert counts[0] == 51
    assert counts[-1] == 299


def test_several_prompts_have_the_places_of_the_first():
    ids = list(range(100, 400))
    body = read_body(json.dumps({"prompt": [ids, [3, 4]]}).encode())
    assert tokens_of_keys(body, prefix_keys(body), ids, list) == [51, 102, 153, 204, 256, 299]


def test_a_token_put_before_the_prompt_has_no_bytes():
    assert ends_of_tokens("abc", [9, 1, 2], {9: 3, 1: 1, 2: 2}) == [0, 1, 3]


def test_tokens_that_stand_for_more_bytes_than_there_are_are_scaled():
    assert ends_of_tokens("abcd", [1, 1, 1, 1], {1: 2}) == [1, 2, 3, 4]


BLOCKS = [b"a", b"b", b"c", b"d", b"e", b"f"]
# chains of a trie: a key is its path, so that equal keys have equal beginnings
CHAINS = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 4), (0, 5, 6), (7, 8)]


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

    @rule(chain=st.sampled_from(CHAINS), ends=st.lists(st.sampled_from([None, *BLOCKS]), min_size=4, max_size=4))
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
        for chain in CHAINS:
            held = [key in self.keys.stored for key in chain]
            assert held == sorted(held, reverse=True)


TestReplica = Replica.TestCase
TestReplica.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_key_is_told_when_its_block_is_there_whichever_comes_first():
    keys = StoredKeys()
    keys.blocks_changed([b"a"], [])
    keys.note([KeyBlock(1, b"a"), KeyBlock(2, b"b")])
    assert keys.stored == {1}
    keys.blocks_changed([b"b"], [])
    assert keys.stored == {1, 2}
    keys.blocks_changed([], [b"b"])
    assert keys.stored == {1}


def test_a_key_before_the_first_full_block_is_stored_with_those_behind_it():
    keys = StoredKeys()
    keys.note([KeyBlock(1, None), KeyBlock(2, b"a")])
    assert keys.stored == set()
    keys.blocks_changed([b"a"], [])
    assert keys.stored == {1, 2}


def test_a_block_that_comes_back_brings_its_key_back():
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
