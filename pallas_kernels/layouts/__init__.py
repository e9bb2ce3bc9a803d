"""Number formats (`e2m1`, `e4m3`, `nvfp4`, `mxfp8`) and the layout of cache pages.

They are contracts with kernels: each file states its bytes in its docstring and gives the encoder
and the decoder of those bytes in plain `jax.numpy`. Which weight or cache uses which format is
decided elsewhere.
"""
