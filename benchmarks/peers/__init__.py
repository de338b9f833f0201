"""Contenders of `cpu_peers.py`: maitred and its peers behind one worker protocol, each in a process of its own."""
