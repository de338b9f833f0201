"""`python -m maitred` is `maitred`."""

from __future__ import annotations

import sys

from maitred.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
