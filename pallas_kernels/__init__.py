"""Kernels with several bodies behind one signature: a readable reference, portable XLA, and Pallas where it pays.

Usable on its own: imports jax, numpy, jaxtyping and the standard library only.
"""
