from collections.abc import Iterable, Mapping

from kvindexd.model import EngineHash
from kvindexd.records import Block

def store(
    blocks: dict[EngineHash, Block],
    held: dict[int, int],
    dirty: set[EngineHash],
    hashes: list[EngineHash],
    keys: bytes,
    step: int,
    start: tuple[int, int],
    size: int,
    slot: tuple[int, int],
    op: int,
    block: type[Block],
    /,
) -> bytes | None: ...
def pack(
    hashes: Iterable[EngineHash], blocks: Mapping[EngineHash, Block], block: type[Block], /
) -> tuple[dict[bytes, bytes | None], list[EngineHash]]: ...
