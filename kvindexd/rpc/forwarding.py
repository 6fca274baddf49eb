"""What one of several processes behind one port cannot answer itself, asked of the one that can."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from kvindexd.rpc.admin_service import AdminService
from kvindexd.rpc.errors import Context
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc


class ForwardingAdmin(AdminService):
    """Administration in a process that ingests nothing. `main`: channel to the one that does."""

    main: grpc.aio.Channel

    async def TailWorker(
        self, request: pb.TailWorkerRequest, context: Context
    ) -> AsyncIterator[pb.TailWorkerResponse]:
        """The events as the ingesting process tells them."""
        call = index_pb2_grpc.KVIndexAdminStub(self.main).TailWorker(request)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as e:
            await context.abort(e.code(), e.details() or "")
        finally:
            call.cancel()
