"""`ROOT` is the checkout. Programs that tests start take it from here: they need nothing of pytest."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
