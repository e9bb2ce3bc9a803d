"""Who runs when, and which pages are whose: plain Python, without jax or any import of it.

`scheduler` makes a `plan` of each step from what `request`s ask for and what earlier results gave;
`pages` owns the blocks.
"""
