"""Settings every test shares: the CPU as platform, one compilation cache per run, the golden data.

The environment is set at import, before any test module imports jax; the processes that tests start inherit it.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Most of the suite's time is compilation of programs that run once. LLVM's lowest level takes a quarter of the time,
# XLA's older code for fusions half of that. Later XLAs have no such code, and refuse flags that they do not know.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))


def pytest_configure(config: pytest.Config) -> None:
    """Gives the run one compilation cache, so that workers and child processes compile a program once.

    It lives as long as the run: an entry from older code or another machine can never be read.
    """
    if hasattr(config, "workerinput") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="k3jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden data: `K3JAX_GOLDEN`, or `../shared/golden` beside the checkout; skips where absent."""
    folder = Path(os.environ.get("K3JAX_GOLDEN") or ROOT.parent / "shared" / "golden")
    if not folder.is_dir():
        pytest.skip(f"golden data not found at {folder} (set K3JAX_GOLDEN)")
    return folder


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_end_with_their_module() -> Iterator[None]:
    """Drops compiled programs after each module: they would add up to gigabytes in a worker."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
