"""What every test of a kernel's compile needs: the mark of `make aot`, time, and the TPU compiler."""

import importlib.util

import pytest

V7X = "tpu7x:2x2x1"
NEEDS_TPU_COMPILER = [
    pytest.mark.aot,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (make aot installs it)"
    ),
]
