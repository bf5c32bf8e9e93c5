"""What runs across devices, inside a `shard_map` of the caller's; the local computation is an argument.

Imports jax, numpy, jaxtyping and the standard library only. Every function is the plain local one on an axis of size 1.
"""
