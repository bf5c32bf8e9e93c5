"""Random damage to headers, index and data: a checkpoint is read, or refused with one line, and nothing else."""

import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k3jax.checkpoint.hf_import import HFCheckpoint
from k3jax.checkpoint.safetensors_dir import CheckpointError
from k3jax.config import ConfigError

NASTY = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, 1e400, "", "../x", "a\nb", "\ud800", "\0", [], {},
    [[]], [0], [-1], [2**62, 4], ["4"], "F32", "U8", "F3", [0, 0], [8, 4], {"dtype": "U8"}, "x" * 5000,
]  # fmt: skip


class Damage:
    """Ways to damage a checkpoint's files."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def bits(self, content: bytes) -> bytes:
        damaged = bytearray(content)
        for _ in range(self.rng.choice((1, 2, 20))):
            damaged[self.rng.randrange(min(len(damaged), self.rng.choice((9, 3000, 10**9))))] = self.rng.randrange(256)
        return bytes(damaged)

    def cut(self, content: bytes) -> bytes:
        at = self.rng.randrange(len(content))
        return content[:at] if self.rng.random() < 0.7 else content + content[at:]

    def length(self, content: bytes) -> bytes:
        choices = (0, 1, 7, 10**8 + 1, 2**31, 2**63, 2**64 - 1, len(content), len(content) - 8, len(content) - 7)
        return struct.pack("<Q", self.rng.choice(choices)) + content[8:]

    def header(self, content: bytes) -> bytes:
        """Another JSON header, of its true length."""
        length = struct.unpack("<Q", content[:8])[0]
        raw = self.json(content[8 : 8 + length])
        return struct.pack("<Q", len(raw)) + raw + content[8 + length :]

    def json(self, raw: bytes) -> bytes:
        """A value replaced, a key repeated or renamed, or nonsense between the characters."""
        tree = json.loads(raw)
        kind = self.rng.randrange(4)
        if kind == 0:
            at = self.rng.randrange(len(raw))
            return (
                raw[:at] + self.rng.choice((b"{", b"]", b'"', b"\\u0000", b"9" * 5000, b"[" * 3000, b"NaN")) + raw[at:]
            )
        if kind == 1:
            name = json.dumps(self.rng.choice(list(tree)))
            return b"{" + f"{name}: {json.dumps(self.rng.choice(NASTY))}, ".encode() + raw[1:]
        node, key = self._place(tree)
        if kind == 2:
            node[key] = self.rng.choice(NASTY)
        elif isinstance(node, dict):
            node[self.rng.choice(("", "x", "model.norm.weight", "\n", "vision_tower.x"))] = node.pop(key)
        return json.dumps(tree).encode()

    def _place(self, tree: dict) -> tuple:
        node = tree
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = self.rng.choice(keys)
            if not isinstance(node[key], (dict, list)) or not node[key] or self.rng.random() < 0.3:
                return node, key
            node = node[key]


def survives(directory: Path) -> str:
    """Open a checkpoint and read all of it; the line that it is refused with, or nothing."""
    try:
        checkpoint = HFCheckpoint.open(directory)
        for entry in checkpoint.entries:
            if entry.shape[0] if entry.shape else 0:
                checkpoint.read(entry, 0, entry.shape[0])
    except (CheckpointError, ConfigError) as error:
        message = str(error)
        assert message.isprintable() and str(directory) in message, repr(message)
        return message
    return ""


def fuzz(directory: Path, seconds: float, seed: int) -> list[str]:
    """Damage one file at a time for some seconds; what each was refused with."""
    rng, outcomes = random.Random(seed), []
    damage = Damage(rng)
    shards = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    ways: list[tuple[Path, Callable[[bytes], bytes]]] = [
        *((shard, way) for shard in shards for way in (damage.bits, damage.cut, damage.length, damage.header)),
        *((shard, damage.header) for shard in shards),
        *((index, way) for way in (damage.bits, damage.cut, damage.json)),
    ]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        file, way = rng.choice(ways)
        whole = file.read_bytes()
        file.write_bytes(way(whole))
        outcomes.append(survives(directory))
        file.write_bytes(whole)
    assert survives(directory) == ""
    return outcomes


@pytest.mark.parametrize(
    "seconds", [4, pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(700)])], ids=["short", "long"]
)
def test_damage_is_refused_with_one_line_or_does_no_harm(tensors, make, seconds):
    outcomes = fuzz(make(tensors), seconds, seed=int(time.time()) if seconds > 60 else 0)
    refused = sum(bool(outcome) for outcome in outcomes)
    assert refused > len(outcomes) / 3
    assert len({outcome.split(": ")[-1][:40] for outcome in outcomes}) > 5
    print(f"{len(outcomes)} damaged checkpoints, {refused} refused")
