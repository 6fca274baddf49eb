"""Block records as the store keeps them: packed, one per engine hash of a worker rank.

Layout (little-endian): flags u8, length u32, key u64, parent u64 [, name u64] [, digest u8 + n
bytes], then a (slot u8, copies u16) pair per slot that holds copies.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvindexd.model import ADD, MUTATION, EngineHash, Profile
from kvindexd.native import dense as _native
from kvindexd.planes import COUNT_BITS, COUNT_MASK, memberships

HAS_NAME, HAS_DIGEST = 1, 2
UNBOUND = b"\0unbound:"
"""Prefix of the pseudo engine hash of a block that is held but bound to no hash."""

_head = struct.Struct("<BIQQ")
_u64 = struct.Struct("<Q")
_pair = struct.Struct("<BH")
_single = struct.Struct("<BIQQBH")
_pack_mutation = struct.Struct("<QQIBBH").pack
_SINGLE = np.dtype(
    [
        ("flags", "u1"),
        ("length", "<u4"),
        ("key", "<u8"),
        ("parent", "<u8"),
        ("slot", "u1"),
        ("copies", "<u2"),
    ]
)


class Block(msgspec.Struct, gc=False, eq=False):
    """What one engine hash is bound to, and where its copies are.

    `key`/`length`: the chain key at the block's end and its token count from the root. `name`:
    what queries probe (`key`, or the lookahead name). `parent`: the chain key at its start.
    `digest`: the engine's full digest where it was reproduced and the hash is shorter.
    `copies`: packed counts per slot (planes.COUNT_BITS each); 0 = bound, not resident.

    Holds no references that could form a cycle, so that millions cost the collector nothing.
    """

    key: int
    length: int
    name: int
    parent: int
    digest: bytes | None = None
    copies: int = 0


def field_of(engine_hash: EngineHash) -> bytes:
    """The hash field of a block record: 8 bytes big-endian for ints, b"b" + raw for bytes.

    Seven raw bytes get another byte in front, so that no field of bytes is 8 long.
    """
    if isinstance(engine_hash, int):
        return engine_hash.to_bytes(8, "big")
    if engine_hash.startswith(UNBOUND):
        return engine_hash
    return (b"b" if len(engine_hash) != 7 else b"7b") + engine_hash


def hash_of(field: bytes) -> EngineHash:
    """The inverse of `field_of`."""
    if len(field) == 8:
        return int.from_bytes(field, "big")
    if field.startswith(UNBOUND):
        return field
    return field[1:] if field.startswith(b"b") else field[2:]


def pack(block: Block) -> bytes:
    """One block as a record."""
    copies, name, digest = block.copies, block.name, block.digest
    if 0 < copies <= COUNT_MASK and name == block.key and digest is None:
        return _single.pack(0, block.length, name, block.parent, 0, copies)
    flags, middle = 0, b""
    if name != block.key:
        flags, middle = HAS_NAME, _u64.pack(name)
    if digest is not None:
        flags |= HAS_DIGEST
        middle += bytes((len(digest),)) + digest
    head = _head.pack(flags, block.length, block.key, block.parent)
    return head + middle + b"".join(_pair.pack(slot, n) for slot, n in counts(copies))


def pack_all(
    hashes: Collection[EngineHash], blocks: Mapping[EngineHash, Block]
) -> dict[bytes, bytes | None]:
    """Field and record of each hash, None for one that is bound no more."""
    if _native is None or not hashes:
        return pack_all_plain(hashes, blocks)
    usual, rest = _native.pack(hashes, blocks, Block)
    if rest:
        usual |= pack_all_plain(rest, blocks)
    return usual


def pack_all_plain(
    hashes: Collection[EngineHash], blocks: Mapping[EngineHash, Block]
) -> dict[bytes, bytes | None]:
    """`pack_all` without the C module: `field_of` and `pack` written out for what nearly every
    block is."""
    single, out = _single.pack, dict[bytes, bytes | None]()
    for engine_hash in hashes:
        block = blocks.get(engine_hash)
        if type(engine_hash) is int and block is not None:
            copies, key = block.copies, block.key
            if 0 < copies <= COUNT_MASK and block.name == key and block.digest is None:
                record = single(0, block.length, key, block.parent, 0, copies)
                out[engine_hash.to_bytes(8, "big")] = record
                continue
        out[field_of(engine_hash)] = None if block is None else pack(block)
    return out


def counts(copies: int) -> list[tuple[int, int]]:
    """(slot, copies) pairs of a packed count."""
    pairs, slot = [], 0
    while copies:
        if n := copies & COUNT_MASK:
            pairs.append((slot, n))
        copies >>= COUNT_BITS
        slot += 1
    return pairs


def unpack(record: bytes) -> Block:
    """The inverse of `pack`. Raises struct.error or IndexError on a truncated record."""
    flags, length, key, parent = _head.unpack_from(record)
    at = _head.size
    name, digest = key, None
    if flags & HAS_NAME:
        (name,) = _u64.unpack_from(record, at)
        at += 8
    if flags & HAS_DIGEST:
        size = record[at]
        digest = record[at + 1 : at + 1 + size]
        at += 1 + size
    block = Block(key, length, name, parent, digest)
    for slot, n in _pair.iter_unpack(record[at:]):
        block.copies |= n << (slot * COUNT_BITS)
    return block


def pack_mutation(name: int, parent: int, length: int, plane: int, op: int) -> bytes:
    """One mutation in model.MUTATION's layout."""
    return _pack_mutation(name, parent, length, plane, op, 0)


def decode_records(
    fields: Sequence[bytes], records: Sequence[bytes], profile: Profile
) -> npt.NDArray[np.void]:
    """ADD mutations (model.MUTATION) for all that a chunk of block records holds.

    `profile`: the rank's own, for its slots and planes. A name that several records share may
    appear more than once; where groups are ANDed, the groups of one block share its record.
    """
    planes = {plane: i for i, plane in enumerate(profile.planes)}
    members = memberships(profile.groups, profile.slots)
    ids = [planes.get(m.plane, -1) if m is not None else -1 for m in members]
    width = _SINGLE.itemsize
    single = [r for r in records if len(r) == width and not r[0]]
    out = [_decode_single(single, ids, [len(m.shifts) if m else 0 for m in members])]
    buffer = bytearray()
    for record in records:
        if len(record) == width and not record[0]:
            continue
        block = unpack(record)
        done: set[int] = set()
        for slot, _ in counts(block.copies):
            member, plane = members[slot], ids[slot]
            if plane >= 0 and plane not in done and member and member.holds(block.copies):
                done.add(plane)
                buffer += _pack_mutation(block.name, block.parent, block.length, plane, ADD, 0)
    if buffer:
        out.append(np.frombuffer(bytes(buffer), MUTATION))
    return np.concatenate(out)


def _decode_single(
    records: Sequence[bytes], plane_ids: Sequence[int], needed: Sequence[int]
) -> npt.NDArray[np.void]:
    """The common record (one slot, no extras), all at once."""
    rows = np.frombuffer(b"".join(records), _SINGLE)
    lone = np.array([p if n == 1 else -1 for p, n in zip(plane_ids, needed, strict=True)] or [-1])
    plane = lone[np.minimum(rows["slot"], len(lone) - 1)]
    keep = plane >= 0
    out = np.zeros(int(keep.sum()), MUTATION)
    out["name"], out["parent"] = rows["key"][keep], rows["parent"][keep]
    out["length"], out["plane"], out["op"] = rows["length"][keep], plane[keep], ADD
    return out
