"""The golden tokenizer and its chat cases."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from k3jax.text import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(golden: Path) -> Tokenizer:
    return Tokenizer.from_dir(golden / "chat" / "tokenizer")


@pytest.fixture(scope="session")
def chat_cases(golden: Path) -> Callable[[str], list[dict]]:
    """The cases of a file of golden chat data by its name."""
    return lambda name: json.loads((golden / "chat" / f"{name}.json").read_text())["cases"]
