from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from maitred.cli.command import Command, make_parser
from maitred.cli.flags import FlagKind, UsageError, bytes_number, flags_of, help_text
from maitred.cli.main import COMMANDS, load
from maitred.config import (
    AdmissionConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
    TensorConfig,
    TiersConfig,
)

ALL_COMMANDS = [load(path) for path in COMMANDS]
CONFIGS = (
    ModelConfig,
    CacheConfig,
    SchedulerConfig,
    ServerConfig,
    AdmissionConfig,
    SpeculativeConfig,
    TiersConfig,
    TensorConfig,
    EngineConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kitchen:
    """The kitchen."""

    num_cooks: int = 2
    """Cooks at the stove; None would be nobody."""
    oven_bytes: int | None = None
    """Bytes in the oven."""
    patience_s: float = 1.5
    """How long a dish may wait (s)."""
    open: bool = True
    """Whether we cook."""
    dishes: tuple[str, ...] = ()
    """What we cook."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """What it costs."""
    api_keys: tuple[str, ...] = ()
    """Keys of the server."""


COMMAND = Command(path="cook", summary="Cook.", run=lambda options: 0, parts=(Kitchen,))


def cook(*words: str, **environ: str) -> Kitchen:
    return COMMAND.parse(words, environ)[Kitchen]


def test_without_words_the_defaults_hold():
    assert cook() == Kitchen()


def test_words_become_typed_values():
    words = "--num-cooks 5 --oven-bytes 1.5GiB --patience-s 2 --no-open --dishes soup --dishes pie --prices soup=3"
    assert cook(*words.split()) == Kitchen(
        num_cooks=5, oven_bytes=3 * 2**29, patience_s=2.0, open=False, dishes=("soup", "pie"), prices={"soup": 3}
    )


def test_a_mapping_may_be_json_or_pairs():
    assert cook("--prices", '{"soup": 3.5}', "--prices", "pie=4").prices == {"soup": 3.5, "pie": 4}


@pytest.mark.parametrize("key", ["", " ", "a ", "\ta"])
def test_a_key_that_no_request_can_bring_is_refused_wherever_it_comes_from(tmp_path, key):
    config = tmp_path / "maitred.yaml"
    for words, environ in ((("--api-key", key), {}), ((), {"MAITRED_API_KEY": key})):
        with pytest.raises(UsageError, match=r"--api-key is .* no request can bring"):
            cook(*words, **environ)
    for value in (key, ["a", key]):
        config.write_text(f"api-key: {json.dumps(value)}\n")
        with pytest.raises(UsageError, match=r"yaml:1: --api-key is .* no request can bring"):
            cook("--config", str(config))
    assert cook("--api-key", "b", MAITRED_API_KEY=key).api_keys == ("b",)


def test_the_environment_stands_below_the_command_line():
    assert cook(MAITRED_API_KEY="a").api_keys == ("a",)
    assert cook("--api-key", "b", "--api-key", "c", MAITRED_API_KEY="a").api_keys == ("b", "c")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-cooks many", "--num-cooks is 'many'; it must be an integer"),
        ("--oven-bytes lots", "--oven-bytes is 'lots'; it must be a number of bytes"),
        ("--patience-s x", "--patience-s is 'x'; it must be a number"),
        ("--prices soup", "--prices is 'soup'; write KEY=VALUE"),
        ("--prices {soup", "it is not valid JSON"),
    ],
)
def test_a_wrong_value_names_flag_value_and_form(words, message):
    with pytest.raises(UsageError) as caught:
        cook(*words.split())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"), [("4096", 4096), ("8GiB", 2**33), ("8g", 2**33), ("1.5KB", 1500), ("2 MiB", 2**21)]
)
def test_bytes_may_carry_a_unit(text, number):
    assert bytes_number(text) == number


def test_help_tells_default_and_unit():
    by_name = {flag.name: flag for flag in flags_of(Kitchen)}
    assert by_name["--num-cooks"].metavar == "N"
    assert by_name["--patience-s"].metavar == "SECONDS"
    assert by_name["--oven-bytes"].metavar == "BYTES"
    assert help_text(by_name["--num-cooks"]) == "Cooks at the stove; unset would be nobody. [default: 2]"
    assert "[default: on]" in help_text(by_name["--open"])
    assert "environment: MAITRED_API_KEY" in help_text(by_name["--api-key"])


PARTS = (
    "model",
    "cache",
    "scheduler",
    "admission",
    "speculative",
    "lora",
    "share",
    "tiers",
    "tensors",
)  # fields of EngineConfig that are dataclasses


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_config_field_is_a_documented_flag_of_serve(config):
    flags = {flag.field: flag for flag in load("serve").flags() if flag.owner is config}
    fields = [f.name for f in dataclasses.fields(config) if f.name not in PARTS]
    if config is ModelConfig:
        fields.append("model")
    for name in fields:
        assert name in flags
        assert flags[name].doc


@pytest.mark.parametrize("command", ALL_COMMANDS, ids=lambda command: command.path)
def test_every_flag_is_in_help_with_its_default(command):
    text = " ".join(make_parser(command).format_help().split())
    for flag in command.flags():
        assert flag.doc, f"{flag.name} has no docstring"
        assert flag.name in text
        assert "".join(help_text(flag).split()) in "".join(text.split())  # lines break at hyphens too
        assert flag.metavar != "TEXT" or flag.kind in (FlagKind.TEXT, FlagKind.LIST, FlagKind.SWITCH)
