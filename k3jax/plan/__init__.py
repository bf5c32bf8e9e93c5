"""What a run takes on a TPU slice, without a TPU: memory, work and traffic of a device, and the compiled programs.

usage: python -m k3jax.plan --config FILE --topology NAME [--mode train,prefill,decode] [--compile] [--json OUT]
"""
