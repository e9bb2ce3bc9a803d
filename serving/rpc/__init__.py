"""The gRPC door: `vllm.grpc.engine.VllmEngine` over whatever is an `Engine`."""
