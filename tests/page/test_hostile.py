"""Whatever a model says is text to look at: it runs nothing, fetches nothing, steers nothing."""

from __future__ import annotations

import pytest

from tests.fakes_api import FakeReplica, running_server, says
from tests.page.scripted import calls, scripted
from tests.page.scripted import says as says_scripted
from tests.page.test_chat import NO_ENGINE, ask
from tests.page.worlds import page_model, serving

ATTACKS = [
    "<script>window.pwned = 1</script>",
    '<img src=x onerror="window.pwned = 1">',
    '<svg onload="window.pwned = 1"><a href="javascript:window.pwned=1">x</a></svg>',
    "<iframe src='javascript:window.pwned=1'></iframe><style>body { display: none }</style>",
    "[click](javascript:window.pwned=1) [me](JaVaScRiPt:window.pwned=1) [now](\tjavascript:window.pwned=1)",
    "[a](data:text/html,<script>window.pwned=1</script>) [b](vbscript:x) [c](file:///etc/passwd) [d](blob:x)",
    "![picture](http://evil.example/pixel.png) ![two](//evil.example/pixel.png)",
    "[relative](/admin/policy) [user](https://good.example@evil.example/) [broken](http://[)",
    "```\n</code></pre><script>window.pwned = 1</script>\n```",
    "```<img src=x onerror=window.pwned=1>\ncode\n```",
    "`<b onmouseover=window.pwned=1>`",
    "| <script>window.pwned=1</script> | b |\n|---|---|\n| <img src=x onerror=window.pwned=1> | [x](javascript:1) |",
    '</textarea></div><form action="http://evil.example"><input name=q autofocus onfocus=window.pwned=1>',
    "<a href='#' style='position:fixed;inset:0'>cover</a><base href='http://evil.example/'>",
    "{{constructor.constructor('window.pwned=1')()}} ${window.pwned=1} <%= 1 %>",
    "&lt;script&gt;window.pwned=1&lt;/script&gt; &#x3C;script&#x3E;",
]


@pytest.fixture(scope="module")
def attacked():
    """All attacks in one answer, and each alone."""
    with serving("\n\n".join(ATTACKS)) as running:
        yield running


def test_no_attack_becomes_an_element_or_a_request(attacked, open_page, expect):
    page = open_page(attacked.url)
    ask(page)
    expect(page.locator(".facts")).to_contain_text("tokens")
    answer = page.locator(".turn.assistant .text")
    for text in (
        "<script>window.pwned = 1</script>",
        '<img src=x onerror="window.pwned = 1">',
        "&lt;script&gt;",
        "{{con",
    ):
        expect(answer).to_contain_text(text)
    made = page.evaluate("[...new Set([...document.querySelectorAll('#log *')].map((e) => e.tagName.toLowerCase()))]")
    allowed = "a b blockquote br button code del details div em h3 h4 h5 hr li ol p pre span strong summary"
    allowed += " table tbody td th thead tr ul"
    assert set(made) <= set(allowed.split())
    attributes = page.evaluate(
        "[...new Set([...document.querySelectorAll('#log *')].flatMap((e) => e.getAttributeNames()))]"
    )
    assert set(attributes) <= {
        *("class", "dir", "href", "rel", "target", "title", "start", "tabindex"),
        *("type", "aria-label", "hidden"),
    }
    links = page.evaluate("[...document.querySelectorAll('#log a')].map((a) => [a.protocol, a.rel, a.host])")
    assert links  # addresses that were written out, and that of a picture: to click on, not fetched
    assert all(link == ["http:", "noopener noreferrer nofollow", "evil.example"] for link in links)
    assert page.evaluate("window.pwned") is None
    assert page.locator("body").is_visible()
    page.reload()
    expect(answer).to_contain_text("<script>")
    assert page.evaluate("window.pwned") is None


def test_inline_scripts_styles_and_strangers_are_refused_by_the_policy(attacked, open_page, expect):
    """If a hole were found in the page, this is what would still stand."""
    page = open_page(
        attacked.url,
        expected=("Content Security Policy", "violates", "404", "TrustedHTML", "TrustedScript", "not be executed"),
    )
    expect(page.locator("#model")).to_have_value("tiny")
    tried = page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.append("window.pwned = 1");
            const picture = document.createElement("img");
            const tries = [
                () => document.body.insertAdjacentHTML("beforeend", "<img src='/none' onerror='window.pwned = 1'>"),
                () => (document.body.innerHTML = "<b>mine</b>"),
                () => document.body.append(script),
                () => picture.setAttribute("onerror", "window.pwned = 1"),
                () => (picture.src = "/none"),
            ];
            return tries.map((attempt) => {
                try { attempt(); return "done"; } catch (error) { return error.name; }
            });
        }"""
    )
    assert tried[:2] == ["TypeError", "TypeError"]  # no text becomes HTML, whoever asks for it
    refused = page.evaluate("fetch('http://127.0.0.2:9/').then(() => 'fetched', (e) => e.name)")
    assert refused == "TypeError"
    assert page.evaluate("window.pwned") is None


SAID_AND_SHOWN = {
    "red \x1b[31malert\x1b[0m \x07bell \x00nul": "red [31malert[0m bell nul",
    "left \u202eright\u202c \u2066isolate\u2069 end": "left right isolate end",
    "a\x9b31mb\x85c": "a31mbc",
    "مرحبا (abc) שלום": "مرحبا (abc) שלום",
    "👩‍👩‍👧 e\u0301 \u200d": "👩‍👩‍👧 e\u0301 \u200d",
}


def test_control_characters_go_and_scripts_of_the_world_stay(open_page, expect):
    replica = FakeReplica()
    with running_server(replica) as server:
        page = open_page(server.url, expected=NO_ENGINE)
        for number, (said, shown) in enumerate(SAID_AND_SHOWN.items(), 1):
            replica.answer = says(said)
            ask(page, said)
            expect(page.locator(".turn.assistant .facts")).to_have_count(number)
            expect(page.locator(".turn.assistant .facts").last).to_contain_text("token")
            last = "[...document.querySelectorAll('{}')].at(-1)"
            assert page.evaluate(f"{last.format('.turn.assistant .text')}.textContent") == shown
            assert page.evaluate(f"{last.format('.turn.user')}.textContent") == shown
        assert page.evaluate("getComputedStyle(document.querySelector('.text')).unicodeBidi") == "isolate"


def test_a_huge_answer_is_cut_and_the_page_lives_on(open_page, expect):
    huge = "**_[`~(<h" * 20_000
    replica = FakeReplica(says(huge), tokens_per_item=8000)
    with running_server(replica, page_model(max_model_len=2**20)) as server:
        page = open_page(server.url, expected=NO_ENGINE)
        ask(page)
        expect(page.locator(".turn.assistant .facts")).to_contain_text("180,001 tokens")
        expect(page.locator(".turn.assistant .text > :last-child")).to_have_text(
            "… 80,000 more characters are not shown."
        )
        assert page.locator(".turn.assistant .text *").count() < 10_000
        replica.answer = says("Still here.")
        ask(page, "Are you?")
        expect(page.locator(".turn.assistant").last).to_contain_text("Still here.")


PATHS_TO_HANG = [
    '"*a ".repeat(35000)',
    '"**".repeat(50000)',
    '"[".repeat(100000)',
    '"![a](".repeat(20000)',
    '"[a](b".repeat(16500) + ")"',
    '"> ".repeat(50000)',
    '">".repeat(100000) + "x"',
    '"- ".repeat(50000)',
    '("  ".repeat(50) + "- x\\n").repeat(950)',
    '"# " + " ".repeat(99500) + "x"',
    '"- - ".repeat(24500) + "x"',
    '"|".repeat(50000) + "\\n" + "|-".repeat(24500) + "x"',
    '"a|b\\n" + "-".repeat(99500) + "|x"',
    '"`".repeat(99999) + "x"',
    '"` `` ".repeat(19500)',
    '"```\\n".repeat(25000)',
    '"http://a".repeat(12500)',
    '"http://" + ")".repeat(95000)',
    '"_a".repeat(50000)',
    '"~~".repeat(49999) + "a"',
    '"\\\\".repeat(100000)',
    '"1. a\\n\\n".repeat(14000)',
    '"\\n".repeat(100000)',
    '"\\u202e\\u0000".repeat(50000)',
    '" ".repeat(100000)',
]


def test_no_text_hangs_the_page(attacked, open_page):
    """Each of these costs hours if any step looks at the rest of the text again and again."""
    page = open_page(attacked.url)
    for text in PATHS_TO_HANG:
        made = page.evaluate(f"import('/static/markdown.js').then((m) => m.markdown({text}).length)")
        assert made >= 0, text


def test_an_answer_of_one_long_word_breaks_nothing_at_phone_width(open_page, expect):
    text = (
        "w" * 600
        + "\n\n```\n"
        + "c" * 600
        + "\n```\n\n| "
        + "t" * 300
        + " | b |\n|--|--|\n| x | y |\n\nhttps://x.example/"
        + "u" * 300
    )
    with running_server(FakeReplica(says(text), tokens_per_item=50), page_model()) as server:
        page = open_page(server.url, expected=NO_ENGINE, viewport={"width": 390, "height": 844})
        ask(page, "v" * 500)
        expect(page.locator(".turn.assistant .facts")).to_contain_text("tokens")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_names_of_requests_and_tenants_are_inert_in_the_live_view(open_page, expect):
    """A client chooses most of its request's id; the server takes no markup in it, and the page would not either."""
    with serving("Hello.") as server:
        page = open_page(server.url)
        expect(page.locator("#state")).to_have_text("live")
        page.evaluate(
            """async () => {
                const { Engine } = await import("/static/engine.js");
                const { Queue } = await import("/static/queue.js");
                const { Tickets } = await import("/static/tickets.js");
                const bad = "<img src=x onerror=window.pwned=1>\\u202e";
                const tickets = new Tickets();
                const waiting = [{ id: bad, tenant: bad, state: "waiting", arrived_at: 0, num_prompt_tokens: 1,
                    num_output_tokens: 0, num_preemptions: 0, priority: 0, reason: bad }];
                const frame = { seats: [], engine: { now: 1, running: [], waiting, num_waiting: 1 } };
                tickets.take(frame);
                new Queue(tickets).take(frame);
            }"""
        )
        expect(page.locator("#queue")).to_contain_text("<img src=x")
        assert page.locator("#queue img").count() == 0
        assert page.evaluate("window.pwned") is None


def test_calls_thoughts_results_and_code_are_only_looked_at(open_page, expect):
    bad = "<img src=x onerror=window.pwned=1>\u202e"
    hidden = f"```html\n<script>window.pwned = 1</script>{bad}\n```\n```{bad}\nx\n```\n```constructor\nx\n```"
    answer = [{"reasoning_content": bad}, *calls(bad, f'{{"a": "{bad}"}}'), {"content": hidden}]
    with scripted(answer, says_scripted(bad)) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        ask(page, bad)
        expect(page.locator(".text .hl-tag").first).to_be_attached()  # in colours, and still text
        page.get_by_label("Result of").fill(bad)
        page.get_by_role("button", name="Send the result").click()
        expect(page.locator(".turn.assistant .text").last).to_contain_text("<img src=x")
        page.get_by_role("button", name="Conversations").click()
        expect(page.get_by_label("Name of <img")).to_be_visible()
        assert page.locator("#log img, #log script, #conversations img").count() == 0
        assert page.evaluate("window.pwned") is None


def test_code_made_to_be_slow_to_colour_does_not_hang_the_page(open_page, expect):
    """What takes a highlighter time that grows with the square of the text, in several blocks of one answer."""
    pairs = [("csharp", "async "), ("cpp", "a"), ("c", "__END__"), ("r", "<!--"), ("javascript", "`${"), ("sql", '"')]
    for some in (pairs[:3], pairs[3:]):
        blocks = [f"```{language}\n{piece * (45_000 // len(piece))}\n```" for language, piece in some]
        with scripted(says_scripted("\n\n".join(blocks)), says_scripted("Still here.")) as script:
            page = open_page(script.url, expected=NO_ENGINE)
            ask(page)
            expect(page.locator(".text .code")).to_have_count(3)
            ask(page, "Are you?")
            expect(page.locator(".turn.assistant .text").last).to_have_text("Still here.")
