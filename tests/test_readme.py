"""What the documents say can be done: commands exist, examples run, links and paths lead somewhere."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import pytest

from k3jax.config import MLAConfig, ModelConfig, MoEConfig, ServeRun, TrainRun, load_run
from k3jax.nn.transformer import Transformer
from tests.serve.conftest import save_run

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every command of README's shell blocks as words, comments dropped and continued lines joined."""
    text = "".join(blocks("sh")).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


PYTHON_COMMANDS = [words[1:] for words in commands() if words[0] == ".venv/bin/python"]


@cache
def help_of(*command: str) -> str:
    run = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout


def test_the_first_two_commands_are_demo_and_test():
    assert [words for words in commands() if words[0] == "make"][:2] == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize("document", DOCUMENTS[:3], ids=name)
def test_every_make_target_exists(document: Path):
    targets = set(re.findall(r"^(?:`|)make ([a-z-]+)|`make ([a-z-]+)`", document.read_text(), re.MULTILINE))
    targets = {target for pair in targets for target in pair if target}
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= rules


@pytest.mark.parametrize("words", PYTHON_COMMANDS, ids=" ".join)
def test_every_option_is_one_that_the_command_has(words: list[str]):
    command = words[:3] if words[0] == "-m" and not words[2].startswith("-") else words[: 1 + (words[0] == "-m")]
    for option in (word for word in words[len(command) :] if word.startswith("--")):
        assert option in help_of(*command)


@pytest.mark.parametrize("words", [w for w in PYTHON_COMMANDS if w[0] in ("train.py", "serve.py")], ids=" ".join)
def test_every_recipe_and_override_loads(words: list[str]):
    overrides = [word for word in words[1:] if "=" in word]
    kind = {"train.py": TrainRun, "serve.py": ServeRun}[words[0]]
    assert load_run(kind, ROOT / words[words.index("--config") + 1], overrides)
    if "--input" in words:
        assert (ROOT / words[words.index("--input") + 1]).is_file()


@pytest.fixture
def folder_with_a_demo(tmp_path: Path) -> Path:
    """A folder with `runs/demo`, where a run left one small layer of MLA and MoE, the quickest to compile."""
    config = ModelConfig(
        vocab_size=512,
        width=32,
        num_layers=1,
        num_dense_layers=0,
        mla_layers=(0,),
        quantized_experts=False,
        dtype="float32",
        mla=MLAConfig(num_heads=2, q_rank=16, kv_rank=12, nope_dim=8, extra_dim=4, v_dim=8),
        moe=MoEConfig(num_experts=4, top_k=2, num_shared=1, expert_width=32, latent_width=16),
    )
    save_run(Transformer(config, jax.random.key(0)), tmp_path / "runs" / "demo")
    return tmp_path


def test_the_python_example_runs(
    folder_with_a_demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder_with_a_demo)
    (example,) = blocks("python")
    scope: dict = {}

    exec(example, scope)

    assert scope["logits"].shape == (1, len("def main():\n"), 512)
    assert scope["out"].shape == (1, 32)
    assert capsys.readouterr().out
    assert "language_model.lm_head.weight" in scope["tensors"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_link_leads_somewhere(document: Path):
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


def test_every_entry_of_the_tree_exists():
    folders: list[str] = []
    for line in blocks("text")[0].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        entries = re.split(r"\s{3,}", line.strip())[0].split()
        for entry in entries:
            assert (ROOT / "".join(folders) / entry).exists(), entry
        if entries[0].endswith("/"):
            folders.append(entries[0])


def test_every_file_that_the_architecture_names_exists():
    paths = re.findall(
        r"`((?:k3jax|pallas_kernels|tests|docs|configs)/[\w./*]+)`", (ROOT / "ARCHITECTURE.md").read_text()
    )
    assert len(paths) > 20
    assert [path for path in paths if not list(ROOT.glob(path))] == []
