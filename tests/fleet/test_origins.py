"""How replicas are named on the command line, and what a name stands for."""

from __future__ import annotations

import pytest

from maitred.api.route.router import resolve
from maitred.core.errors import ConfigError
from maitred.fleet.config import Origin, RouteTarget, parse_target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://one:8000", RouteTarget(Origin("one", 8000))),
        ("http://one:8000/v1/", RouteTarget(Origin("one", 8000))),
        ("https://one", RouteTarget(Origin("one", 443, is_tls=True))),
        ("http://[::1]:9000=2.5", RouteTarget(Origin("::1", 9000), weight=2.5)),
        ("https://gateway/team/v1=1", RouteTarget(Origin("gateway", 443, is_tls=True, prefix="/team"))),
        ("dns://replicas:8000", RouteTarget(Origin("replicas", 8000), follows_name=True)),
    ],
)
def test_an_address_is_read(text, target):
    assert parse_target(text) == target


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("one:8000", "no URL of a server"),
        ("ftp://one", "no URL of a server"),
        ("http://", "no URL of a server"),
        ("http://one:99999", "no URL"),
        ("http://one:8000=fast", "is a weight"),
        ("http://one:8000=0", "above 0"),
        ("http://one:8000=nan", "above 0"),
        ("http://user:word@one", "no user"),
        ("http://one/?a", "no user, query or fragment"),
        ("dns://one", "has a port"),
        ("dns://one:80/path", "no path"),
        ("http://o ne:80", "no URL of a server"),
    ],
)
def test_what_is_no_address_says_how_one_looks(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_target(text)


def test_an_origin_writes_itself_as_a_url():
    assert Origin("::1", 80, prefix="/a").url == "http://[::1]:80/a"


async def test_a_name_stands_for_its_addresses():
    assert Origin("127.0.0.1", 8000) in await resolve(Origin("localhost", 8000))
