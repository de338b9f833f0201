"""Where the system says that it ended a process for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from maitred.engine.supervisor import num_oom_kills

MACHINE = {"proc/vmstat": "nr_free_pages 7\noom_kill 5\n"}
GROUP = {"proc/self/cgroup": "0::/box/serve\n", "sys/fs/cgroup/box/serve/memory.events": "oom 3\noom_kill 2\n"}
OLD_GROUP = {"proc/self/cgroup": "5:memory:/serve\n"}
NO_EVENTS = {"proc/self/cgroup": "0::/\n"}  # the topmost group has none


@pytest.mark.parametrize(
    ("files", "count"),
    [({**MACHINE, **GROUP}, 2), ({**MACHINE, **OLD_GROUP}, 5), ({**MACHINE, **NO_EVENTS}, 5), (MACHINE, 5), ({}, 0)],
)
def test_our_own_group_counts_else_the_machine(tmp_path: Path, files: dict[str, str], count: int):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_oom_kills(tmp_path) == count


def test_a_count_of_this_machine_is_never_in_the_way():
    assert num_oom_kills() >= 0
