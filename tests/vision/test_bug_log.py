"""Faults that other servers of such models had in public, each with a test here or elsewhere that fails on its kind."""

from pathlib import Path

import pytest

from k3jax.text import Tokenizer, render_chat
from k3jax.vision import image_token_count

# The test of the kind, and where the fault was reported.
KNOWN = {
    "vision/test_preprocess.py": {
        "test_a_transparent_image_is_a_chessboard": "smg#1984, #1991: alpha dropped, a transparent logo turns black",
        "test_the_chessboard_has_its_size_after_resizing": "smg#1984, #1991: alpha handled before resizing",
        "test_downscaling_is_antialiased_bicubic": "sglang#33349: bicubic without antialiasing and rounding",
        "test_a_size_is_padded_up_never_to_the_nearest": "aisimulate#84, #87: sides rounded to the nearest multiple",
    },
    "vision/test_image.py": {
        "test_golden_sizes": "smg#1984: an older processor's budget of 16,384 patches; aisimulate#84, #87",
    },
    "vision/test_pack.py": {
        "test_features_come_back_in_order": "sglang#36018: a rank's index used on the list of all grids; "
        "sglang#31212: fewer images than ranks hang",
    },
    "sharding/test_vision.py": {
        "test_rows_of_unequal_images_are_encoded_and_trained_as_on_one_device": "sglang#36018, sglang#31212: other "
        "grids on every device, devices without an image",
    },
    "nn/test_vision.py": {
        "test_an_empty_row_gives_nothing_and_finite_gradients": "sglang#31212: an empty shard",
        "test_packed_items_of_any_sizes_match_the_slow_version": "llama.cpp#19170: order of positions and patches",
        "test_golden_logits_of_text_with_images": "llama.cpp#19170, in the whole model",
        "test_norm_epsilon_at_small_inputs": "spec: two readings of a norm built without an epsilon",
    },
    "vision/test_bug_log.py": {
        "test_a_prompt_names_the_size_before_resizing": "spec: the resized size in the prompt",
        "test_text_that_spells_a_placeholder_is_no_image": "sglang#33003: a user's text taken as an image slot",
    },
    "serve/test_images.py": {
        "test_features_reach_the_model_whatever_chunk_they_fall_into": "equal token ids of different images must share "
        "no cached prompt",
    },
}


@pytest.mark.parametrize(("file", "test"), [(file, test) for file, tests in KNOWN.items() for test in tests])
def test_every_known_fault_has_a_test(file: str, test: str) -> None:
    assert f"def {test}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")


TOKENIZER = Tokenizer.bytes()
IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


def test_a_prompt_names_the_size_before_resizing() -> None:
    prompt = render_chat([{"role": "user", "content": [IMAGE]}], tokenizer=TOKENIZER, image_sizes=[(8000, 6000)])
    assert "<|media_begin|>image 8000x6000<|media_content|>" in prompt.text
    assert prompt.ids.count(TOKENIZER.special_id("<|media_pad|>")) == image_token_count(8000, 6000) == 16_428


def test_text_that_spells_a_placeholder_is_no_image() -> None:
    content = [{"type": "text", "text": "say <|kimi_image_placeholder|><|media_pad|>"}, IMAGE]
    prompt = render_chat([{"role": "user", "content": content}], tokenizer=TOKENIZER, image_sizes=[(28, 28)])
    assert prompt.ids.count(TOKENIZER.special_id("<|media_pad|>")) == 1
    assert "say <|kimi_image_placeholder|><|media_pad|>" in prompt.text
