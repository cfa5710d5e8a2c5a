"""The header of a chunk file: what it says, how it is written, and every reason for which it is refused.

    offset 0   magic (8), format version (4), check over both (4)          the same in every future format
    offset 16  file bytes (8), header bytes (4), meta bytes (4), tokens (4), layers (4), check over all before (8)
    then       meta (canonical JSON), token ids (uint32), table (offset 8, length 8, xxh3_128 16 per layer),
               payload digest (32), BLAKE3 of everything before it (32)
    then       one segment per layer, each at a multiple of 4096

Integers are little-endian. The two short checks come first so that a damaged length is told apart from a truncated
file and a damaged version from a newer one. The payload digest is keyed with the namespace: equal rows of two tenants
have unequal digests.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import NoReturn

from blake3 import blake3
from xxhash import xxh3_64_digest, xxh3_128, xxh3_128_digest

from kvstrata.contract.encoding import digest
from kvstrata.contract.identity import ChunkContext, ChunkIdentity, Namespace
from kvstrata.contract.layout import SegmentLayout
from kvstrata.errors import DamagedError, Reason

__all__ = [
    "ALIGNMENT",
    "FORMAT_VERSION",
    "PREFIX_BYTES",
    "Header",
    "SegmentEntry",
    "file_bytes_of",
    "header_bytes_of",
    "payload_bytes",
    "payload_key",
]

FORMAT_VERSION = 1
ALIGNMENT = 4096
MAGIC = b"KVSTRATA"

_PREAMBLE = struct.Struct("<8sI")
_LENGTHS = struct.Struct("<QIIII")
_ENTRY = struct.Struct("<QQ16s")
_DIGEST_BYTES = 32
_PREAMBLE_BYTES = _PREAMBLE.size + 4
PREFIX_BYTES = _PREAMBLE_BYTES + _LENGTHS.size + 8


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Where the segment of one layer lies in the file, in bytes, and its xxh3_128."""

    offset: int
    length: int
    checksum: bytes


def payload_bytes(layout: SegmentLayout, tokens: int) -> int:
    """Bytes that one layer of a chunk of `tokens` tokens takes in a file: the used pages of every K/V head."""
    return layout.kv_heads * -(-tokens // layout.page_tokens) * layout.page_bytes


def file_bytes_of(identity: ChunkIdentity, layout: SegmentLayout, layers: int) -> int:
    """Size of the file of a chunk, header and padding included, known before its rows are."""
    length = payload_bytes(layout, len(identity.token_ids))
    return _aligned(_header_bytes(identity, layout, layers)) + (layers - 1) * _aligned(length) + length


def payload_key(namespace: Namespace) -> bytes:
    """32-byte key of the payload digest of one tenant and salt."""
    return _payload_key(namespace.tenant, namespace.salt)


@lru_cache(maxsize=256, typed=True)
def _payload_key(tenant: str, salt: str) -> bytes:
    return digest("payload-key/1", Namespace(tenant, salt))


@dataclass(frozen=True)
class Header:
    """Everything a chunk file says about itself. `segments` is ordered by layer."""

    identity: ChunkIdentity
    layout: SegmentLayout
    segments: tuple[SegmentEntry, ...]
    payload_digest: bytes

    @classmethod
    def of(cls, identity: ChunkIdentity, layout: SegmentLayout, segments: Sequence[Sequence[memoryview]]) -> Header:
        """Describe `segments[layer]`, a list of buffers for each layer; reads all of them once for each checksum."""
        length = payload_bytes(layout, len(identity.token_ids))
        keyed = blake3(key=payload_key(identity.context.namespace))
        checksums = []
        for buffers in segments:
            if len(buffers) == 1:
                checksums.append(xxh3_128_digest(buffers[0]))
                keyed.update(buffers[0])
                continue
            hasher = xxh3_128()
            for buffer in buffers:
                hasher.update(buffer)
                keyed.update(buffer)
            checksums.append(hasher.digest())
        first, stride = _aligned(_header_bytes(identity, layout, len(checksums))), _aligned(length)
        entries = tuple(SegmentEntry(first + stride * i, length, checksum) for i, checksum in enumerate(checksums))
        return cls(identity, layout, entries, keyed.digest())

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the segment of each layer begins."""
        return tuple(entry.offset for entry in self.segments)

    @cached_property
    def checksums(self) -> tuple[bytes, ...]:
        """The xxh3_128 of each layer."""
        return tuple(entry.checksum for entry in self.segments)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.segments[-1].offset + self.segments[-1].length

    def encode(self) -> bytes:
        """The bytes before the first segment, without the padding that follows them."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        meta = _meta(self.identity, self.layout)
        ids = _little_endian(array("I", self.identity.token_ids)).tobytes()
        table = b"".join(_ENTRY.pack(entry.offset, entry.length, entry.checksum) for entry in self.segments)
        size = PREFIX_BYTES + len(meta) + len(ids) + len(table) + 2 * _DIGEST_BYTES
        preamble = _PREAMBLE.pack(MAGIC, FORMAT_VERSION)
        preamble += xxh3_64_digest(preamble)[:4]
        tokens = len(self.identity.token_ids)
        prefix = preamble + _LENGTHS.pack(self.file_bytes, size, len(meta), tokens, len(self.segments))
        body = prefix + xxh3_64_digest(prefix) + meta + ids + table + self.payload_digest
        return body + blake3(body).digest()

    @classmethod
    def parse(cls, raw: bytes, chunk: bytes) -> Header:
        """Inverse of `encode` for the chunk named `chunk`.

        Errors: `DamagedError` with CHUNK_DAMAGED when a checksum or the structure is wrong, CHUNK_FOREIGN when the
        header is sound but describes another chunk than the one asked for.
        """
        name = chunk.hex()
        if blake3(raw[:-_DIGEST_BYTES]).digest() != raw[-_DIGEST_BYTES:]:
            _damaged(name, "its header does not match its checksum")
        _, _, meta_bytes, tokens, layers = _LENGTHS.unpack_from(raw, _PREAMBLE_BYTES)
        ids_at = PREFIX_BYTES + meta_bytes
        table_at = ids_at + 4 * tokens
        digest_at = table_at + _ENTRY.size * layers
        if digest_at + 2 * _DIGEST_BYTES != len(raw) or not layers:
            _damaged(name, "the lengths in its header contradict each other")
        try:
            meta = json.loads(raw[PREFIX_BYTES:ids_at])
            ids = _little_endian(array("I", raw[ids_at:table_at]))
            context = _context(json.dumps(meta["context"], sort_keys=True))
            identity = ChunkIdentity(context, bytes.fromhex(meta["parent"]), meta["start"], tuple(ids))
            layout = SegmentLayout(**meta["layout"])
        except (KeyError, TypeError, ValueError) as error:
            _damaged(name, f"its header cannot be understood ({type(error).__name__}: {error})")
        if identity.digest != chunk:
            raise DamagedError(
                Reason.CHUNK_FOREIGN,
                f"the file named {name} holds chunk {identity.digest.hex()}",
                "it is ignored and its rows are recomputed; find out who put the file there",
                chunk=name,
            )
        entries = tuple(SegmentEntry(*_ENTRY.unpack_from(raw, table_at + _ENTRY.size * i)) for i in range(layers))
        header = cls(identity, layout, entries, raw[digest_at : digest_at + _DIGEST_BYTES])
        header._check_table(name, len(raw))
        return header

    def _check_table(self, name: str, header_bytes: int) -> None:
        length = payload_bytes(self.layout, len(self.identity.token_ids))
        end = header_bytes
        for layer, entry in enumerate(self.segments):
            if entry.length != length or entry.offset % ALIGNMENT or entry.offset < end:
                _damaged(name, f"the place of layer {layer} in its table is impossible")
            end = entry.offset + entry.length


def header_bytes_of(prefix: bytes, file_bytes: int, chunk: bytes) -> int:
    """Bytes of the whole header, from the first `PREFIX_BYTES` bytes of a file of `file_bytes` bytes.

    Errors: `DamagedError` with CHUNK_TRUNCATED, CHUNK_DAMAGED or CHUNK_FORMAT_NEWER.
    """
    name = chunk.hex()
    if len(prefix) < PREFIX_BYTES:
        _truncated(name, file_bytes, f"at least {PREFIX_BYTES}")
    magic, version = _PREAMBLE.unpack_from(prefix)
    if magic != MAGIC or xxh3_64_digest(prefix[: _PREAMBLE.size])[:4] != prefix[_PREAMBLE.size : _PREAMBLE_BYTES]:
        _damaged(name, "its first bytes are not those of a chunk file")
    if version > FORMAT_VERSION:
        raise DamagedError(
            Reason.CHUNK_FORMAT_NEWER,
            f"chunk {name} is written in format {version}; this version reads up to {FORMAT_VERSION}",
            "upgrade kvstrata, or use another store directory",
            chunk=name,
        )
    checked = PREFIX_BYTES - 8
    if version < 1 or xxh3_64_digest(prefix[:checked]) != prefix[checked:]:
        _damaged(name, "the lengths in its header do not match their checksum")
    declared, header_bytes, *_ = _LENGTHS.unpack_from(prefix, _PREAMBLE_BYTES)
    if file_bytes < declared:
        _truncated(name, file_bytes, str(declared))
    if file_bytes > declared or not PREFIX_BYTES < header_bytes <= declared:
        _damaged(name, f"it has {file_bytes} bytes where its header declares {declared}")
    return int(header_bytes)


def _header_bytes(identity: ChunkIdentity, layout: SegmentLayout, layers: int) -> int:
    fixed = PREFIX_BYTES + len(_meta(identity, layout)) + 4 * len(identity.token_ids)
    return fixed + _ENTRY.size * layers + 2 * _DIGEST_BYTES


def _meta(identity: ChunkIdentity, layout: SegmentLayout) -> bytes:
    return (
        f'{{"codec":"none","context":{identity.context.encoded},"layout":{_layout(layout)},'
        f'"parent":"{identity.parent.hex()}","start":{identity.start}}}'
    ).encode()


@lru_cache(maxsize=64)
def _layout(layout: SegmentLayout) -> str:
    return json.dumps(asdict(layout), sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=64)
def _context(text: str) -> ChunkContext:
    """The chunks of a history share one object, and with it the digest that each of their names is taken over."""
    return ChunkContext.from_json(json.loads(text))


def _little_endian(values: array[int]) -> array[int]:
    if struct.pack("=I", 1) != struct.pack("<I", 1):
        values.byteswap()
    return values


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _damaged(name: str, what: str) -> NoReturn:
    raise DamagedError(
        Reason.CHUNK_DAMAGED,
        f"chunk {name} is damaged: {what}",
        "it is set aside and its rows are recomputed; check the disk if this happens again",
        chunk=name,
    )


def _truncated(name: str, found: int, declared: str) -> NoReturn:
    raise DamagedError(
        Reason.CHUNK_TRUNCATED,
        f"chunk {name} is cut off: {found} bytes where {declared} were written",
        "it is set aside and its rows are recomputed; check the disk if this happens again",
        chunk=name,
    )
