"""Who runs when: continuous batching behind gRPC."""
