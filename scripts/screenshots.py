"""Takes the pictures of docs/page.md: SmolLM2 served to three tenants under load, and Chromium looking at it.

    .venv/bin/python scripts/screenshots.py [--out docs/images] [--rate 1.5] [--seconds 40]

Needs Debian's chromium (scripts/debian-packages), SmolLM2's package (`maitred models`), and Pillow, which the extra
`plot` brings.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

from maitred.api.http.server import HttpServer
from maitred.api.serving import create_app
from maitred.cli.local import start_engine
from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from maitred.storage.key_files import TenantFile, make_key

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu"]
MODEL = "smollm2"
QUESTIONS = ("What is gravity?", "Name three primary colors.")
QUALITY = 82


@dataclass(frozen=True, slots=True)
class Guest:
    """A tenant, and how its requests look."""

    name: str
    weight: int
    often: int
    system: str
    most_tokens: int
    repeats: int


GUESTS = (
    Guest("bistro", 4, 3, "You are the waiter of a small bistro. Be brief and friendly. " * 6, 60, 1),
    Guest("brasserie", 2, 2, "You work in a large brasserie and know the card by heart. " * 8, 120, 1),
    Guest("nightly", 1, 2, "Summarise. " * 3, 300, 14),
)
SHOTS = (
    ("page-desk-light", 1500, 1240, "light", "chat"),
    ("page-desk-dark", 1500, 1240, "dark", "chat"),
    ("page-phone-light", 390, 844, "light", "chat"),
    ("page-phone-dark", 390, 844, "dark", "engine"),
)


def tenants_file(folder: Path) -> Path:
    """Every key's secret is its tenant's name."""
    lines = ["tenants:"]
    for name, weight in [*((guest.name, guest.weight) for guest in GUESTS), ("house", 1)]:
        key = make_key(name, secret=name, admin=name == "house").key
        lines += [f"  {name}:", f"    weight: {weight}", "    keys:"]
        lines += [f"      - {{id: key_{name}, sha256: {key.digest.hex()}, admin: {str(key.admin).lower()}}}"]
    path = folder / "tenants.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    config = EngineConfig(
        model=ModelConfig(model=MODEL, max_model_len=4096, generation_config={"temperature": 0.0}),
        cache=CacheConfig(kv_cache_memory_bytes=2**27),
        scheduler=SchedulerConfig(max_num_seqs=12, policy="mlfq", quantum_tokens=40),
    )
    engine = start_engine(config)
    tenants = TenantFile(tenants_file(folder))
    settings = ServerConfig(port=0)
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    app = create_app(engine.replica, engine.model, settings, tenants=tenants, admission=engine.admission)
    server = HttpServer(app, settings, on_open=lambda host, port: listening.set_result(port))
    task = asyncio.create_task(server.serve())
    try:
        yield f"http://127.0.0.1:{await listening}"
    finally:
        server.should_exit = True
        await task
        tenants.close()
        engine.replica.stop()


async def load(url: str, rate: float) -> None:
    """Requests at `rate` a second, until cancelled."""
    draw = random.Random(5)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        while True:
            (guest,) = draw.choices(GUESTS, [guest.often for guest in GUESTS])
            question = draw.choice(QUESTIONS) * draw.randint(1, guest.repeats)
            body = {
                "model": MODEL,
                "messages": [{"role": "system", "content": guest.system}, {"role": "user", "content": question}],
                "max_tokens": draw.randint(guest.most_tokens // 2, guest.most_tokens),
                "ignore_eos": True,
                "temperature": 1,
            }
            group.create_task(ask(session, url, guest.name, body))
            await asyncio.sleep(draw.expovariate(rate))


async def ask(session: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.read()


async def opened(browser: Browser, url: str, width: int, height: int, scheme: str, show: str) -> Page:
    phone = width < 500
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=2 if phone else 1,
        has_touch=phone,
        is_mobile=phone,
    )
    page = await context.new_page()
    await page.add_init_script("sessionStorage.setItem('maitred.key', 'house')")
    await page.goto(url)
    if show == "engine":
        await page.get_by_role("button", name="Engine").click()
        return page
    for question in QUESTIONS:
        await page.get_by_label("Message").fill(question)
        await page.keyboard.press("Enter")
        await page.locator("#send:visible").wait_for(timeout=120_000)
    return page


async def take(out: Path, rate: float, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder)) as url, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            pages = {name: await opened(browser, url, *rest) for name, *rest in SHOTS}
            guests = asyncio.create_task(load(url, rate))
            await asyncio.sleep(seconds)
            for name, page in pages.items():
                await page.bring_to_front()
                await asyncio.sleep(2.5)  # a hidden page does not draw
                picture = Image.open(BytesIO(await page.screenshot())).convert("RGB")
                picture.save(out / f"{name}.webp", quality=QUALITY, method=6)
            guests.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await guests
            await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(options.out, options.rate, options.seconds))


if __name__ == "__main__":
    main()
