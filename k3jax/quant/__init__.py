"""Number formats of weights and activations; the arrays and kernels themselves live in `pallas_kernels.mx`."""
