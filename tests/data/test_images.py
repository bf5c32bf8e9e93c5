"""Chats with images become rows: tokens, patches and grids that belong together, however they are packed."""

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from k3jax.config import ConfigError, DataConfig
from k3jax.data import Batch, BatchIterator, load_corpus
from k3jax.text import Tokenizer

TOKENIZER = Tokenizer.bytes()
PAD = TOKENIZER.special_id("<|media_pad|>")


def part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def picture(level: int, size: tuple[int, int]) -> Image.Image:
    """A picture of one gray, which says which picture it is."""
    return Image.new("RGB", size, (level,) * 3)


def write(folder: Path, chats: list[list[Any]]) -> Path:
    """A .jsonl file of chats: each a list of contents of the user's message, answered by the gray's number."""
    lines = []
    for content in chats:
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "seen"}]
        lines.append(json.dumps({"messages": messages, "thinking": False}))
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Chats with no, one and two pictures of 1 to 6 tokens: the text names the gray levels of its pictures."""
    contents: list[list[Any]] = [[{"type": "text", "text": "none"}]]
    for number in range(12):
        content: list[Any] = [{"type": "text", "text": f"{10 * number + 5}"}]
        for index in range(1 + number % 2):
            level, size = 10 * number + 5 + index, (28 * (1 + number % 3), 28 * (1 + index))
            picture(level, size).save(tmp_path / f"{level}.png")
            content.append(part(f"{level}.png"))
        contents.append(content)
    return write(tmp_path, contents)


def config_of(source: Path, **options: Any) -> DataConfig:
    rows = {"seq_len": 512, "row_images": 5, "row_patches": 64, "batch_size": 2}
    return DataConfig(**{"source": str(source), "eval_fraction": 0.0, **rows, **options})


def check_row(tokens: np.ndarray, patches: np.ndarray, grids: np.ndarray) -> int:
    """Follow the text of a row, and find each picture that it names among the row's patches; returns their number."""
    text, start, images = TOKENIZER.decode(tokens.tolist()), 0, 0
    assert int(np.sum(tokens == PAD)) == int(np.sum(np.prod(grids, axis=1)) // 4)
    for span in text.split('role="user"<|sep|>')[1:]:
        level = span.split("<|")[0]
        for index in range(span.count("<|media_begin|>")):
            count = int(np.prod(grids[images]))
            gray = np.rint((patches[start : start + count] + 1) * 127.5)
            assert np.all(gray == int(level) + index)
            assert f"image {14 * grids[images, 2]}x{14 * grids[images, 1]}" in span
            start, images = start + count, images + 1
    assert not patches[start:].any() and not grids[images:].any()
    return images


def test_rows_hold_the_pictures_that_their_texts_name(chats: Path) -> None:
    config = config_of(chats)
    iterator = BatchIterator(load_corpus(config, TOKENIZER).train, config)
    found = 0
    for _ in range(6):
        batch = next(iterator)
        assert batch.patches is not None and batch.grids is not None
        shapes = Batch.shapes(2, 512, row_images=5, row_patches=64)
        assert {name: (x.shape, x.dtype) for name, x in vars(batch).items()} == {
            name: (x.shape, x.dtype) for name, x in vars(shapes).items()
        }
        found += sum(map(check_row, batch.tokens, batch.patches, batch.grids))
        assert not np.any(batch.loss_mask & (batch.targets == PAD))  # answers alone are trained on
    assert found > 12


def test_the_order_continues_from_a_saved_position(chats: Path) -> None:
    config = config_of(chats, workers=2)
    corpus = load_corpus(config, TOKENIZER)
    first, second = BatchIterator(corpus.train, config), BatchIterator(corpus.train, config)
    for _ in range(3):
        next(first)
    second.seek(json.loads(json.dumps(first.position())))
    for one, other in zip(vars(next(first)).values(), vars(next(second)).values(), strict=True):
        np.testing.assert_array_equal(one, other)
    first.close()
    second.close()


def test_data_urls_are_read_and_rows_of_text_have_no_images(tmp_path: Path) -> None:
    buffer = BytesIO()
    picture(40, (28, 28)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    config = config_of(write(tmp_path, [[{"type": "text", "text": "40"}, part(url)]]))
    batch = next(BatchIterator(load_corpus(config, TOKENIZER).train, config))
    assert batch.patches is not None and batch.grids is not None
    assert check_row(batch.tokens[0], batch.patches[0], batch.grids[0]) >= 1
    config = config_of(write(tmp_path, [[{"type": "text", "text": "no picture"}]]), row_images=0, row_patches=0)
    assert next(BatchIterator(load_corpus(config, TOKENIZER).train, config)).patches is None


@pytest.mark.parametrize(
    ("url", "size", "options", "message"),
    [
        ("none.png", None, {}, r"#0: none\.png: .*No such file"),
        ("broken.png", None, {}, r"broken\.png: not a complete image"),
        ("data:image/png,xx", None, {}, "a data URL must begin with data:image/"),
        ("p.png", (56, 56), {"row_patches": 12}, r"16 patches, but data\.row_patches = 12"),
        ("p.png", (56, 56), {"row_images": 0, "row_patches": 0}, r"16 patches, but data\.row_patches = 0"),
        ("p.png", (56, 56), {"seq_len": 32}, r"tokens, but data\.seq_len = 32"),
    ],
)
def test_a_chat_that_cannot_be_trained_on_is_named(
    tmp_path: Path, url: str, size: Any, options: dict, message: str
) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    if size:
        picture(1, size).save(tmp_path / url)
    config = config_of(write(tmp_path, [[part(url)]]), **options)
    with pytest.raises(ConfigError, match=message) as caught:
        load_corpus(config, TOKENIZER)
    assert "\n" not in str(caught.value)
