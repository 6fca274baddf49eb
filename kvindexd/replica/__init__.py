"""The in-memory replica of the index that queries read."""

from kvindexd.replica.columns import BlockInfo
from kvindexd.replica.replica import Replica, ReplicaOptions, Stats
from kvindexd.replica.state import Facts, Judged, State, judge
from kvindexd.replica.table import Table
from kvindexd.replica.view import Phase, ScopeView, WorkerView

__all__ = [
    "BlockInfo",
    "Facts",
    "Judged",
    "Phase",
    "Replica",
    "ReplicaOptions",
    "ScopeView",
    "State",
    "Stats",
    "Table",
    "WorkerView",
    "judge",
]
