from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from maitred.cli.console import inert


def test_what_steers_a_terminal_becomes_plain_text():
    assert inert("a\x1b[31mred\x07\r\x9b2J\x00z") == "a[31mred2Jz"
    assert inert("user\u202etxt.exe\u2066") == "usertxt.exe"


def test_ordinary_text_stays():
    for text in ("plain", "two\nlines\tand a tab", "Grüße 世界 👩‍🍳", "عربي"):
        assert inert(text) == text


@given(st.text())
def test_no_control_character_survives(text):
    assert not any(c not in {"\n", "\t"} and (ord(c) < 32 or 127 <= ord(c) < 160) for c in inert(text))
