"""What other engines' kernels take for the cases of the benchmark, in microseconds.

Measured by us on one H200 on 2026-11-29 (device copy 4.23 TB/s, torch 2.11, Triton 3.6, CUDA
graphs, inputs rotated past the L2, medians). `vLLM` is the Triton kernels of vLLM 0.33 for this
model, whose cache is BF16 or FP8: it has no NVFP4 cache on Hopper. `FA2` is FlashInfer 0.7.2 with a
request for each token and key/value head (specification kernels 9.3 and 9.5).
"""

VLLM_BF16 = "vLLM bf16"
VLLM_FP8 = "vLLM fp8"
FLASHINFER_NVFP4 = "FA2 nvfp4"
PEERS = (VLLM_BF16, VLLM_FP8, FLASHINFER_NVFP4)

MICROSECONDS: dict[str, dict[str, float]] = {
    "score 1 x 512K, 1 query": {VLLM_BF16: 34.2, VLLM_FP8: 36.7},
    "score 1 x 512K, 8 queries": {VLLM_BF16: 47.3, VLLM_FP8: 53.6},
    "score 64 x 128K, 1 query": {VLLM_BF16: 470, VLLM_FP8: 322},
    "score 16 x 128K, 8 queries": {VLLM_BF16: 130, VLLM_FP8: 140},
    "select 1 x 512K, 1 query": {VLLM_BF16: 47.9, VLLM_FP8: 48.7},
    "select 1 x 512K, 8 queries": {VLLM_BF16: 56.6, VLLM_FP8: 70.6},
    "select 64 x 128K, 1 query": {VLLM_BF16: 505, VLLM_FP8: 339},
    "select 16 x 128K, 8 queries": {VLLM_BF16: 178, VLLM_FP8: 182},
    "score prefill 16K": {VLLM_BF16: 363, VLLM_FP8: 651},
    "attend 1 x 32K, 1 query": {VLLM_BF16: 5.8, VLLM_FP8: 7.7, FLASHINFER_NVFP4: 15.2},
    "attend 32 x 32K, 1 query": {VLLM_BF16: 39.5, VLLM_FP8: 50.2, FLASHINFER_NVFP4: 56.6},
    "attend 32 x 32K, 8 queries": {VLLM_BF16: 250, VLLM_FP8: 356, FLASHINFER_NVFP4: 348},
    "attend prefill 16K, random blocks": {VLLM_BF16: 8133, VLLM_FP8: 17554},
}
