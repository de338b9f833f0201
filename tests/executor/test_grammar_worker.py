"""The worker by itself: what of a model's tokenizer it can bind, and that masks and forced tokens say the same."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.executor.grammar import Grammars
from maitred.executor.grammar_worker import CompiledGrammars, GrammarFault, WorkerSlot
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text.tokenizer import Tokenizer
from tests.engine.grammar_worlds import GRAMMARS
from tests.text.kinds import byte_level, gemma, llama_2, unigram
from tests.waiting import HANGS_S

BUILTIN = CompiledGrammars(BUILTIN_FOLDER, 1536, (0,))
NUM_LOGITS = 1536  # of the built-in model


def allowed(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(GRAMMARS[:3]), st.randoms(use_true_random=False))
def test_a_token_is_forced_where_and_only_where_the_masks_to_come_leave_it_alone(grammar: str, chooser: object):
    """Token by token under the masks, and with what is forced after each token: the same."""
    slow, quick = (WorkerSlot(BUILTIN.matcher(grammar), forces, NUM_LOGITS) for forces in (False, True))
    for _ in range(40):
        if slow.complete:
            break
        token = chooser.choice(allowed(slow.mask()))  # type: ignore[attr-defined]
        slow.consume([token])
        quick.consume([token])
        for forced in quick.force():
            assert allowed(slow.mask()) == [forced]
            slow.consume([forced])
        assert slow.complete == quick.complete
        if not slow.complete:
            assert slow.mask() == quick.mask()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(GRAMMARS[:3]), st.integers(0, 12), st.booleans(), st.randoms(use_true_random=False))
def test_masks_after_drafts_are_those_that_the_drafts_would_lead_to(
    grammar: str, num_known: int, ends_wrong: bool, chooser: object
):
    """And the matcher is where it was; drafts end where the grammar does not allow one, or where it ends."""
    slot, stepping = (WorkerSlot(BUILTIN.matcher(grammar), False, NUM_LOGITS) for _ in range(2))
    tokens: list[int] = []
    masks: list[bytes] = []
    while not stepping.complete and len(tokens) < num_known + 5:
        token = chooser.choice(allowed(stepping.mask()))  # type: ignore[attr-defined]
        tokens.append(token)
        stepping.consume([token])
        if len(tokens) > num_known and not stepping.complete:
            masks.append(stepping.mask())
    slot.consume(tokens[:num_known])
    if slot.complete:
        assert list(slot.masks_after([5])) == []
        return
    before, drafts = slot.mask(), tokens[num_known:]
    if ends_wrong and not stepping.complete:
        drafts += [next(token for token in range(1536) if token not in allowed(stepping.mask()))] * 2
    assert list(slot.masks_after(drafts)) == masks
    assert slot.mask() == before


@pytest.mark.parametrize("make", [byte_level, llama_2, gemma])
def test_every_token_stands_for_the_bytes_that_we_write_for_it(make: Callable[[], Tokenizer], tmp_path: Path):
    tokenizer = make()
    (tmp_path / "tokenizer.json").write_text(tokenizer._inner.to_str(), encoding="utf-8")
    eos = tokenizer.token_id("</s>")
    assert eos is not None
    bound = CompiledGrammars(tmp_path, tokenizer.vocab_size, (eos,))._tokenizer
    ordinary = set(range(tokenizer.vocab_size)) - set(tokenizer._added)
    written = {token: tokenizer.token_bytes(token) for token in ordinary}
    no_text = [token for token, text in written.items() if b"\xff" in text]  # never in UTF-8; the library's own mark
    assert {token: bound.decode_bytes([token]) for token in ordinary} == written | dict.fromkeys(no_text, b"")
    assert bound.is_canonical


def test_a_tokenizer_that_is_no_bpe_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(unigram()._inner.to_str(), encoding="utf-8")
    with pytest.raises(ValueError, match="Unigram"):
        CompiledGrammars(tmp_path, 300, (1,))


def test_a_grammar_with_an_unknown_name_is_refused_in_one_line():
    with pytest.raises(GrammarFault, match=r"unknown name: .nobody.") as refused:
        BUILTIN.matcher("start: /a/ nobody")
    assert "\n" not in str(refused.value)


def test_a_tokenizer_that_changed_since_the_start_binds_no_grammar(tmp_path: Path):
    file = Path(shutil.copy(BUILTIN_FOLDER / "tokenizer.json", tmp_path))
    grammars, told = Grammars(str(tmp_path), NUM_LOGITS, (0,)), queue.SimpleQueue[tuple[str, bool]]()
    file.write_text(file.read_text() + " ")
    grammars.prepare(GRAMMARS[1], lambda *verdict: told.put(verdict))
    error, is_grammars_fault = told.get(timeout=HANGS_S)
    assert f"{file} changed since the start; restart" in error
    assert not is_grammars_fault
    grammars.close()


def test_masks_are_as_wide_as_the_logits_where_the_tokenizer_is_narrower():
    wide = CompiledGrammars(BUILTIN_FOLDER, 1600, (0,))
    assert len(WorkerSlot(wide.matcher(GRAMMARS[1]), True, 1600).mask()) * 8 >= 1600
