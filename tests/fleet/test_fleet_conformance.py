"""Every policy keeps its promises when one queue feeds several replicas."""

from __future__ import annotations

import pytest

from maitred.policy.policies import POLICIES
from maitred.testing.conformance_fleet import check_fleet_policy


@pytest.mark.parametrize(("number", "name"), enumerate(sorted(POLICIES)))
def test_a_policy_keeps_its_promises_over_several_replicas(number: int, name: str):
    """Each before two of the six balances, and each balance with several policies."""
    check_fleet_policy(POLICIES[name], (number % 6, (number + 3) % 6))


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_keeps_its_promises_before_every_balance(name: str):
    check_fleet_policy(POLICIES[name])
