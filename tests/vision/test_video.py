"""Frames of a video: which are looked at, the chunks they make, and their place in a prompt."""

import numpy as np
import pytest
from PIL import Image

from k3jax.text import Tokenizer
from k3jax.text.chat import render_video
from k3jax.vision import ImageError, pack, preprocess, video
from k3jax.vision.image import image_size
from k3jax.vision.video import preprocess_video, sampled_frames, timestamp

TOKENIZER = Tokenizer.bytes()


def frames(count: int, size: tuple[int, int] = (60, 50)) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), np.uint8)) for _ in range(count)]


@pytest.mark.parametrize(
    ("total", "fps", "most", "expected"),
    [
        (24, 24.0, None, [0, 3, 7, 10, 13, 16, 20, 23]),  # a second of 24 frames: eight of them
        (5, 4.0, None, [0, 1, 2, 3, 4]),  # slower than what is looked at: all
        (1, 30.0, None, [0]),
        (2, 60.0, None, [0]),  # never none
        (240, 24.0, 3, [0, 120, 239]),
    ],
)
def test_frames_are_spread_evenly(total: int, fps: float, most: int | None, expected: list[int]) -> None:
    assert sampled_frames(total, fps, max_frames=most) == expected


@pytest.mark.parametrize(("total", "fps"), [(0, 24.0), (5, 0.0), (5, float("inf")), (5, float("nan"))])
def test_a_video_without_frames_or_speed_is_refused(total: int, fps: float) -> None:
    with pytest.raises(ImageError, match="both must be above 0"):
        sampled_frames(total, fps)


def test_chunks_have_four_frames_and_the_last_what_is_left() -> None:
    shown = frames(6)
    chunks = preprocess_video(shown, [0.125 * n for n in range(6)])
    assert [chunk.grid for chunk in chunks] == [(4, 4, 6), (2, 4, 6)]
    assert [chunk.timestamp for chunk in chunks] == ["00:00:00.000", "00:00:00.500"]
    alone = np.concatenate([preprocess(frame)[0] for frame in shown[4:]])
    np.testing.assert_array_equal(chunks[1].patches, alone)
    packed = pack([(chunk.patches, chunk.grid) for chunk in chunks])
    assert [tokens for _, _, tokens in packed.spans] == [chunk.num_tokens for chunk in chunks] == [6, 6]


@pytest.mark.parametrize(("count", "limit"), [(1, 16_384), (40, 16_384), (60, 10_923)])
def test_a_video_shares_its_patches_among_its_frames(count: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(video, "preprocess", lambda image, *, limit: seen.append(limit) or preprocess(image))
    image = Image.new("RGB", (1, 1))
    preprocess_video([image] * count, [0.0] * count)
    assert set(seen) == {limit}


def test_a_frame_has_a_limit_of_its_own() -> None:
    _, (_, rows, columns) = preprocess(Image.new("RGB", (500, 400)), limit=100)
    assert (rows, columns) == image_size(500, 400, limit=100).grid == (10, 12)


def test_frames_of_two_sizes_are_refused() -> None:
    with pytest.raises(ImageError, match="2 frames of 2 sizes"):
        preprocess_video([*frames(1), *frames(1, (50, 60))], [0.0, 1.0])


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "00:00:00.000"), (3723.4567, "01:02:03.456"), (25 * 3600 + 0.9999, "01:00:00.999")]
)
def test_a_timestamp_is_cut_off_and_of_one_day(seconds: float, text: str) -> None:
    assert timestamp(seconds) == text


def test_every_chunk_has_its_time_and_its_tokens_in_the_prompt() -> None:
    prompt = render_video([("00:00:00.000", 2), ("00:00:00.500", 1)], tokenizer=TOKENIZER)
    begin, content, pad, end = (
        TOKENIZER.special_id(f"<|media_{name}|>") for name in ("begin", "content", "pad", "end")
    )
    word, times = TOKENIZER.encode("video"), [TOKENIZER.encode(f"00:00:00.{n}00") for n in (0, 5)]
    assert prompt.ids == [*times[0], begin, *word, content, pad, pad, end, *times[1], begin, *word, content, pad, end]
