"""`python -m maitred` is `maitred`."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036  run from a checkout, which no installer looked at
    told = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"error: maitred needs Python 3.11 or later, this is {told}; run it with one, as python3.12 -m maitred")

from maitred.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
