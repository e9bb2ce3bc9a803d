"""Kernels, and the byte formats that they read.

One folder per operation: its signature is in `__init__.py`, its meaning in `reference.py`, its
fast versions beside them. Number formats and page layouts are in `layouts`. Nothing here knows of
models, meshes or requests.
"""
