"""The load generator: requests at a rate, at a concurrency, or as sessions of agents, over gRPC or
HTTP, and what came of them in numbers and pictures.

    minimax-serve tiny --no-http --port 50077
    minimax-serve bench --port 50077 --dataset-name agentic --max-concurrency 4 \\
        --agentic-think-scale 0.1

On two busy CPU cores that sent 597 requests of 468,814 prompt tokens: 89.99 % of them came from the
prefix cache, and 89.99 % could (blocks of 16). Over the gateway's /v1/completions it was 83.58 % of
83.58 %, over its chat 83.30 %, as the template's tokens are not in the theory.
"""
