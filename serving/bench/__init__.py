"""The load generator: requests at a rate, at a concurrency, or as sessions of agents, over gRPC or
HTTP, and what came of them in numbers and pictures.

    minimax-serve tiny --no-http --port 50077
    minimax-serve bench --port 50077 --dataset-name agentic --max-concurrency 4 \\
        --agentic-think-scale 0.1

On two busy CPU cores that sent 597 requests of 468,814 prompt tokens: 89.99 % of them came from the
prefix cache, and 89.99 % could (blocks of 16). With 256 blocks (`--num-gpu-blocks-override 256`)
contexts were evicted: 79.56 % of the 85.18 % that could. More in serving/README.md.
"""
