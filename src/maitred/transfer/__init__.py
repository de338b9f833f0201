"""KV between processes: pieces that a receiver pulls under a lease, over shared memory or sockets."""
