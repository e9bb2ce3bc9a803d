"""The load generator: requests at a rate, at a concurrency, or as sessions of agents, over gRPC or
HTTP, and what came of them in numbers and pictures.

    minimax-serve bench --dataset-name agentic --max-concurrency 4
"""
