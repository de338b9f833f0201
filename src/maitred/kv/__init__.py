"""KV blocks: their books, tiers that keep them (host, disk, Redis, peers), and what moves them."""
