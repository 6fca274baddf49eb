"""A small DNS server over UDP, on a free loopback port, for A, AAAA and SRV questions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsStub(asyncio.DatagramProtocol):
    """`records`: (name, type) -> texts. `rcode`: of every answer; `silent`: no answer at all."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode = dns.rcode.NOERROR
        self.silent = False
        self.questions = 0
        self.address = ""
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        host, port = transport.get_extra_info("sockname")[:2]
        self.address = f"{host}:{port}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.questions += 1
        if self.silent or self._transport is None:
            return
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        answer.set_rcode(self.rcode)
        for question in query.question:
            kind = dns.rdatatype.to_text(question.rdtype)
            name = question.name.to_text(omit_final_dot=True)
            texts = self.records.get((name, kind), [])
            if texts and self.rcode == dns.rcode.NOERROR:
                answer.answer.append(dns.rrset.from_text(question.name, 5, "IN", kind, *texts))
        self._transport.sendto(answer.to_wire(), addr)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[DnsStub]:
        """Serve until the block ends."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        try:
            yield self
        finally:
            transport.close()
