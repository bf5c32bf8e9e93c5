"""Who may import what, beyond the layers that import-linter checks in `make lint`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STDLIB = set(sys.stdlib_module_names)


def imported_modules(path: Path) -> Iterator[str]:
    """The absolute names of all modules that a file imports, at any depth of its code."""
    package = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level] if node.level else ()
            yield ".".join((*parents, *([node.module] if node.module else [])))


def foreign_imports(paths: list[Path], allowed: set[str]) -> list[str]:
    """`file: module` for each import that is neither the standard library's nor in or under `allowed`."""
    found = []
    for path in paths:
        for module in imported_modules(path):
            prefixes = {module.rsplit(".", n)[0] for n in range(module.count(".") + 1)}
            if module.split(".")[0] not in STDLIB and not prefixes & allowed:
                found.append(f"{path.relative_to(ROOT)}: {module}")
    return found


def modules_after(statement: str) -> set[str]:
    """The names of all modules that a fresh interpreter holds after `statement`."""
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def under(modules: set[str], *packages: str) -> set[str]:
    return {m for m in modules if any(m == p or m.startswith(p + ".") for p in packages)}


def test_the_kernels_stand_alone():
    files = sorted((ROOT / "pallas_kernels").rglob("*.py"))
    assert foreign_imports(files, {"pallas_kernels", "jax", "numpy", "jaxtyping"}) == []


def test_the_sharding_stands_alone():
    files = sorted((ROOT / "sharding").rglob("*.py"))
    assert files
    assert foreign_imports(files, {"sharding", "jax", "numpy", "jaxtyping"}) == []


def test_the_reference_shares_no_code_with_what_it_checks():
    assert foreign_imports([ROOT / "k3jax/reference.py"], {"k3jax.config", "jax", "jaxtyping"}) == []


def test_the_config_knows_no_part_of_the_model():
    names = ("k3jax.config", "k3jax.hf_config", "k3jax.recipe")
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in names]
    assert foreign_imports(files, {*names, "omegaconf", "yaml"}) == []


def test_orbax_is_called_from_one_file():
    users = [p for p in (ROOT / "k3jax").rglob("*.py") if any(m.split(".")[0] == "orbax" for m in imported_modules(p))]
    assert [str(p.relative_to(ROOT)) for p in users] == ["k3jax/checkpoint/orbax_io.py"]


def test_importing_k3jax_is_light():
    modules = modules_after("import k3jax")
    assert under(modules, "jax", "flax", "optax", "orbax", "grain", "tiktoken", "matplotlib") == set()


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import k3jax.serve.batch, k3jax.serve.engine", ("k3jax.train", "k3jax.data", "grain", "matplotlib")),
        ("import serve", ("k3jax.train", "k3jax.data", "grain", "matplotlib")),
        ("import k3jax.train.loop", ("k3jax.serve",)),
        ("import train", ("k3jax.serve",)),
        ("import k3jax; k3jax.load, k3jax.hf_tensors, k3jax.Transformer", ("k3jax.train", "k3jax.serve", "grain")),
    ],
)
def test_serving_and_training_do_not_know_each_other(statement: str, forbidden: tuple[str, ...]):
    assert under(modules_after(statement), *forbidden) == set()
