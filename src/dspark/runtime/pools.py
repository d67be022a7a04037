"""The pools, flat: ``from dspark.runtime.pools import KVPool, StatePool``."""

from __future__ import annotations

from dspark.runtime.kv_pool import KVPool, StaleRowsError
from dspark.runtime.state_pool import StateLayout, StatePool, VerifyStates

__all__ = ["KVPool", "StaleRowsError", "StateLayout", "StatePool", "VerifyStates"]
