"""The public gRPC contract: `index_pb2` (messages) and `index_pb2_grpc` (stubs, servicers)."""
