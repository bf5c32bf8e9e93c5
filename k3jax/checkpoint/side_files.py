"""The small files beside a checkpoint's tensors: config.json, the tokenizer's, the processor's, the licence."""

from __future__ import annotations

import dataclasses
import json

from k3jax.checkpoint.folder import Folder
from k3jax.checkpoint.safetensors_dir import INDEX
from k3jax.config import ModelConfig

PLAN = "import.json"  # beside the weights of an import: what it is of, and into how many units it is cut
CONFIG = "config.json"
_ENDINGS = (".json", ".model", ".txt", ".jinja", ".py", ".md")
_LARGEST = 64 << 20  # bytes


def side_files(folder: Folder) -> dict[str, bytes]:
    """{name: content} of them; nothing that names tensors, and nothing of more than 64 MiB."""
    names = [name for name in folder.top_names() if name.endswith(_ENDINGS) and name not in (PLAN, INDEX)]
    found = {name: folder.read(name) for name in names}
    return {name: content for name, content in found.items() if len(content) <= _LARGEST}


def exported_side_files(folder: Folder, config: ModelConfig) -> dict[str, bytes]:
    """The same, config.json only where it still says what `config` does."""
    found = side_files(folder)
    if CONFIG in found:
        then = ModelConfig.from_hf(json.loads(found[CONFIG]))
        if dataclasses.replace(then, name=config.name, kda=config.kda) != config:  # the tensors fixed A_log's length
            del found[CONFIG]
    return found
