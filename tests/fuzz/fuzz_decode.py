"""Coverage-guided fuzzing of the decoder and of the state machine behind it.

    python tests/fuzz/fuzz_decode.py -max_total_time=60 tests/fuzz/seeds

needs `atheris`. What it finds goes into tests/fuzz/seeds, which the suite runs with or without it.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import atheris
except ImportError:  # the seeds run without it
    atheris = None

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

if atheris is not None and __name__ == "__main__":
    with atheris.instrument_imports(include=["kvindexd"]):
        from kvindexd.residency import Options, Residency
        from kvindexd.wire import BatchError, decode_batch
else:
    from kvindexd.residency import Options, Residency
    from kvindexd.wire import BatchError, decode_batch

OPTIONS = Options(bindings=200, blocks=100, parked=20)


def one(raw: bytes) -> None:
    """Decode and apply a payload twice over; only BatchError may come of it."""
    try:
        batch = decode_batch(raw)
    except BatchError:
        return
    rank = Residency(OPTIONS)
    for seq in range(2):
        rank.apply(batch, seq=seq, digest=seq, now=float(seq))
    held = len(rank.holdings.blocks)
    assert held <= OPTIONS.bindings + OPTIONS.blocks, held


def main() -> None:
    """Hand over to libFuzzer."""
    if atheris is None:
        raise SystemExit("atheris is not installed: pip install atheris")
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
