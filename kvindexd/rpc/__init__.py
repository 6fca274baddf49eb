"""The network surface: gRPC servicers, health, reflection."""
