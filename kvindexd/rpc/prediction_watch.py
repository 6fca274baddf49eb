"""What the replica sees, for picks to know: events that confirm or drop predictions, removals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvindexd.model import ADD, WorkerKey
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.replica.view import WorkerView
from kvindexd.scoring.picker import Picker


def watch_predictions(replica: Replica[Registration], picker: Picker) -> None:
    """Let events end the predictions that they speak of, and removed ranks be forgotten."""
    predictions = picker.predictions

    def applied(key: WorkerKey, mutations: npt.NDArray[np.void]) -> None:
        if predictions.active(key):
            stored = mutations["op"] == ADD
            names = mutations["name"]
            predictions.seen(key, names[stored].tolist(), names[~stored].tolist())

    def changed(view: WorkerView[Registration]) -> None:
        if replica.worker(view.key) is None:
            picker.forget(view.key)
        else:
            predictions.at_epoch(view.key, view.epoch)

    replica.watch_mutations(applied)
    replica.watch(changed)
