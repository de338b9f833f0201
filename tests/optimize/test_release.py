"""A published version is whole, is checked with everybody's programs, and is refused as soon as a byte differs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from maitred.config import CacheConfig, EngineConfig, ProcessConfig
from maitred.core.errors import CheckpointError, ConfigError, OutOfMemory
from maitred.engine.build import load_engine
from maitred.engine.engine_thread import in_thread
from maitred.engine.intake import ServedModel
from maitred.engine.model_facts import Footprint
from maitred.engine.releases import StartingRelease
from maitred.engine.supervisor import Start
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.model.shelf import ModelRelease, Shelf
from maitred.optimize.release import publish
from tests.cli.running import maitred_thread
from tests.engine.test_gguf_served import a_model
from tests.fakes_api import make_model
from tests.shelves import other_model
from tests.text.test_gguf_tokenizer import byte_level

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="the program openssl is not there")


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of one model."""
    root = tmp_path_factory.mktemp("shelf") / "waiter"
    publish(str(BUILTIN_FOLDER), Shelf(root))
    tuned = other_model(root.parent / "tuned", 1)
    report = {"tool": "finetune", "parent": {"name": "maitred-mini"}, "flags": {"seed": 7}, "data": ["ab"], "kl": 0.5}
    (tuned / "report.json").write_text(json.dumps(report))
    publish(str(tuned), Shelf(root))
    return root


@pytest.fixture
def shelf(published: Path, tmp_path: Path) -> Shelf:
    """A copy of it to be spoilt."""
    return Shelf(Path(shutil.copytree(published, tmp_path / "waiter", symlinks=True)))


def test_versions_are_numbered_and_the_last_is_in_service_with_what_its_tool_reported(shelf: Shelf):
    assert shelf.versions() == [1, 2]
    assert shelf.current()[0] == 2
    release = shelf.verify(2)
    assert (release.name, release.tool, release.flags) == ("tuned", "finetune", {"seed": 7})
    assert (release.parent, release.data, release.figures) == ({"name": "maitred-mini"}, ["ab"], {"kl": 0.5})
    assert len(release.golden) == 16
    assert release.golden != shelf.verify(1).golden
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=shelf.folder(2), check=True)


def test_a_gguf_file_is_a_version_too_and_its_tokens_are_repeated(tmp_path: Path):
    shelf = Shelf(tmp_path / "waiter")
    assert publish(a_model(tmp_path / "small.gguf", byte_level), shelf).name == "small.gguf"
    assert sorted(path.name for path in shelf.folder(1).iterdir()) == ["SHA256SUMS", "release.json", "small.gguf"]
    assert checked(shelf, shelf.verify(1)) == 1


def test_a_model_that_its_gate_refused_an_adapter_and_a_folder_that_is_no_shelf_are_refused(tmp_path: Path):
    model = other_model(tmp_path / "model", 1)
    (model / "report.json").write_text('{"tool": "prune", "passed": false}')
    with pytest.raises(ConfigError, match="the gate refused"):
        publish(str(model), Shelf(tmp_path / "shelf"))
    assert not (tmp_path / "shelf").exists()
    with pytest.raises(ConfigError, match=r"no shelf: it holds .*config\.json"):
        publish(str(BUILTIN_FOLDER), Shelf(model))
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match="merge it into its model first"):
        publish(str(tmp_path), Shelf(tmp_path / "shelf"))


def test_what_a_kill_left_is_no_version_and_is_removed(shelf: Shelf):
    left = shelf.root / ".3.part"
    left.mkdir()
    (left / "model.safetensors").touch()
    assert shelf.versions() == [1, 2]
    assert publish(str(BUILTIN_FOLDER), shelf).version == 3
    assert shelf.verify(3).name == "maitred-mini"
    assert sorted(path.name for path in shelf.root.iterdir()) == [".lock", "1", "2", "3", "current"]


def grow(version: Path) -> None:
    with (version / "config.json").open("a") as file:
        file.write(" ")


def lose(version: Path) -> None:
    (version / "tokenizer.json").unlink()


def add(version: Path) -> None:
    (version / "chat_template.jinja").write_text("{{ messages }}")


def link(version: Path) -> None:
    (version / "tokenizer.json").replace(version.parent / "elsewhere.json")
    (version / "tokenizer.json").symlink_to("../elsewhere.json")


def cut_sums(version: Path) -> None:
    os.truncate(version / "SHA256SUMS", 40)


def swap_numbers(version: Path) -> None:
    shutil.rmtree(version)
    shutil.copytree(version.with_name("1"), version)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (grow, "config.json has other bytes"),
        (lose, "tokenizer.json is missing"),
        (add, "chat_template.jinja was no file of it"),
        (link, "tokenizer.json was no file of it"),
        (cut_sums, "was no file of it"),
        (swap_numbers, "release.json is of version 1"),
        (shutil.rmtree, "2 is not there"),
    ],
)
def test_a_version_that_is_not_as_it_was_published_is_never_put_into_service(
    spoil: Callable[[Path], None], words: str, shelf: Shelf
):
    shelf.use(1)
    spoil(shelf.folder(2))
    with pytest.raises(CheckpointError, match=words):
        shelf.use(2)
    assert shelf.current()[0] == 1


@needs_openssl
def test_a_signed_version_is_verified_by_openssl_and_no_other_key_or_bytes_pass(shelf: Shelf, tmp_path: Path):
    for name in ("mine", "other"):
        openssl("genpkey", "-algorithm", "ed25519", "-out", tmp_path / f"{name}.pem")
        openssl("pkey", "-in", tmp_path / f"{name}.pem", "-pubout", "-out", tmp_path / f"{name}.pub.pem")
    trusting = Shelf(shelf.root, tmp_path / "mine.pub.pem")
    publish(str(BUILTIN_FOLDER), shelf, tmp_path / "mine.pem")
    sums = shelf.folder(3) / "SHA256SUMS"
    words = ("pkeyutl", "-verify", "-pubin", "-inkey", tmp_path / "mine.pub.pem", "-rawin", "-in", sums)
    openssl(*words, "-sigfile", f"{sums}.sig")
    assert trusting.verify(3).version == 3
    with pytest.raises(CheckpointError, match="is not signed"):
        trusting.verify(2)
    with pytest.raises(CheckpointError, match="was not signed by the owner"):
        Shelf(shelf.root, tmp_path / "other.pub.pem").verify(3)
    with pytest.raises(ConfigError, match="no public key in PEM; make it of the private one"):
        Shelf(shelf.root, tmp_path / "mine.pem")
    sums.write_text(sums.read_text().replace("\n", "\n\n", 1))
    assert shelf.verify(3).version == 3
    with pytest.raises(CheckpointError, match="was not signed by the owner"):
        trusting.verify(3)


@needs_openssl
def test_a_key_of_another_kind_signs_nothing(shelf: Shelf, tmp_path: Path):
    openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:1024", "-out", tmp_path / "rsa.pem")
    with pytest.raises(ConfigError, match="it is no Ed25519 key; make one: openssl genpkey"):
        publish(str(BUILTIN_FOLDER), shelf, tmp_path / "rsa.pem")
    assert shelf.versions() == [1, 2]


def checked(shelf: Shelf, release: ModelRelease, *beside: ServedModel) -> int:
    """The version that the edge knows, once the engine was asked for its golden tokens."""
    config = EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=4 * 2**20))
    start = Start(config=config, process=ProcessConfig(in_process=True), open=in_thread(load_engine))

    async def check() -> int:
        engine = await asyncio.to_thread(starting.wait)
        try:
            await starting.checked(engine)
        finally:
            await engine.replica.close()
        assert engine.model.names == ("waiter",)
        return engine.model.version

    starting = StartingRelease(shelf, start, release, beside)
    return asyncio.run(check())


def test_an_engine_repeats_its_golden_tokens_and_others_are_told_with_the_text(shelf: Shelf, caplog):
    release = shelf.verify(2)
    assert checked(shelf, release) == 2
    first = release.golden[0]
    others = tuple(msgspec.structs.replace(each, output=each.output[::-1]) for each in release.golden)
    wrong = msgspec.structs.replace(release, golden=others)
    with pytest.raises(CheckpointError, match=rf"other tokens .* after 16 of 16 texts \({first.text!r}\)"):
        checked(shelf, wrong)
    assert checked(shelf, msgspec.structs.replace(wrong, made_by="another machine")) == 2
    assert "were made by another machine, and this is maitred" in caplog.text
    misread = msgspec.structs.replace(
        wrong, made_by="another machine", golden=(msgspec.structs.replace(first, prompt=first.prompt[1:]), *others[1:])
    )
    with pytest.raises(CheckpointError, match=r"reads .* as other tokens"):
        checked(shelf, misread)


def test_a_version_is_refused_where_the_one_in_service_may_still_need_its_memory(shelf: Shelf):
    held = Footprint(
        architecture="",
        num_parameters=0,
        executor="",
        device="",
        dtype="",
        kv_dtype="",
        weights_bytes=0,
        kv_bytes=2**60,
    )
    with pytest.raises(OutOfMemory, match="and 0 B are available"):
        checked(shelf, shelf.verify(1), make_model(footprint=held))


async def test_the_command_lists_versions_and_rolls_back(shelf: Shelf, capsys):
    assert await maitred_thread("releases", str(shelf.root), "--use", "1") == 0
    assert await maitred_thread("releases", str(shelf.root)) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("   1  20")
    assert first.endswith("  maitred-mini, current")
    assert second.endswith("  tuned, finetune")
    (shelf.folder(1) / "release.json").write_text("{")
    assert await maitred_thread("releases", str(shelf.root)) == 0
    told = capsys.readouterr()
    assert ("1/release.json is damaged" in told.err, told.out.strip()) == (True, second.strip())
    assert await maitred_thread("evaluate", str(shelf.root)) == 1
    assert f"{shelf.root} is a shelf of versions; give {shelf.root}/current" in capsys.readouterr().err
    assert await maitred_thread("publish", str(shelf.root), str(shelf.root.with_name("other"))) == 1
    assert await maitred_thread("releases", str(shelf.root.with_name("other"))) == 1
    assert "other is no shelf of versions; make one: maitred publish" in capsys.readouterr().err
    assert await maitred_thread("publish", str(BUILTIN_FOLDER), str(shelf.root.with_name("new")), "--sign", "no") == 1
    assert not shelf.root.with_name("new").exists()
    assert await maitred_thread("publish", str(shelf.root)) == 2
    assert "takes a model and a shelf, and was given 1" in capsys.readouterr().err
