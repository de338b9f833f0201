"""Servers of other kinds for `tensor_peers.py`; each runs in its own environment and imports nothing of maitred."""
