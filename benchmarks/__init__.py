"""Measurements: the TPU compiler's schedule without a TPU (`static_cycles`)."""
