"""Images of batch requests: what is read, what is refused, and that their features reach the model."""

import base64
import dataclasses
import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from k3jax.config import ModelConfig, VisionConfig
from k3jax.nn.transformer import Transformer
from k3jax.nn.vision import Vision
from k3jax.serve.batch import Batch, make_progress
from k3jax.serve.engine import Engine, Sizes
from k3jax.serve.fields import RequestError
from k3jax.serve.images import ImageEncoder, ImageReader
from k3jax.serve.jobs import Jobs, parse_request
from k3jax.serve.request import Job, Limits, parse_line
from k3jax.serve.results import OutputFile
from k3jax.serve.scheduler import Scheduler
from k3jax.text import Tokenizer
from k3jax.vision import prepare
from tests.serve.conftest import RECIPE, random_model

TOKENIZER = Tokenizer.bytes()
LIMITS = Limits(max_context=600, default_max_tokens=5, max_top_logprobs=4)
PAD = TOKENIZER.special_id("<|media_pad|>")
BRIEF = {"chat_template_kwargs": {"thinking": False}}  # no message about effort, which is long in bytes


def file_of(size: tuple[int, int] = (60, 50), kind: str = "PNG", level: int = 90) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", size, (level,) * 3).save(buffer, kind)
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def parse(*urls: Any, reader: ImageReader | None = None, text: str = "what is it?") -> Job:
    content = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **BRIEF}
    whole = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    reader = ImageReader(PAD) if reader is None else reader
    return parse_request(parse_line(json.dumps(whole).encode()), tokenizer=TOKENIZER, limits=LIMITS, reader=reader)


def refusal(*urls: Any, reader: ImageReader | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*urls, reader=reader)
    assert "\n" not in str(caught.value) and caught.value.param == "messages"
    return caught.value


def test_a_prompt_has_the_images_and_their_original_sizes() -> None:
    job = parse(data_url(file_of()), data_url(file_of((100, 28), "JPEG")))
    (request,) = job.requests
    assert "image 60x50<|media_content|>" in TOKENIZER.decode(list(request.prompt))
    assert "image 100x28<|media_content|>" in TOKENIZER.decode(list(request.prompt))
    assert [image.grid for image in job.images] == [(1, 4, 6), (1, 2, 8)]
    assert request.prompt.count(PAD) == 6 + 4


def test_files_come_from_one_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "a.png").write_bytes(file_of())
    (tmp_path / "secret.png").write_bytes(file_of())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    reader = ImageReader(PAD, folder)
    for url in ("a.png", "file://a.png", f"file://{folder}/a.png"):
        assert parse(url, reader=reader).images[0].size == (60, 50)
    for url in ("../secret.png", f"file://{tmp_path}/secret.png", "link.png"):
        assert "a file outside image_folder" in str(refusal(url, reader=reader))
    assert "the recipe allows none" in str(refusal("a.png"))


@pytest.mark.timeout(20)  # a pipe would be waited for
@pytest.mark.parametrize(
    "url",
    ["none.png", "", ".", "folder", "pipe", "circle", "a\0.png", "file://a\0", "\ud800.png", "a" * 5000, "a/" * 3000],
    ids=lambda url: repr(url[:10]),
)
def test_what_is_no_file_of_the_folder_is_one_short_line(tmp_path: Path, url: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    error = str(refusal(url, reader=ImageReader(PAD, tmp_path)))
    assert ("no such file in image_folder" if url else "an image part without a URL") in error
    assert str(tmp_path) not in error


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(file_of((500, 500)))
    monkeypatch.setattr("k3jax.serve.images.image_size_of", lambda source: (60, 50))
    error = refusal("a.png", reader=ImageReader(PAD, tmp_path))
    assert "image 1 of the messages: an image of 60x50 and then 500x500 pixels: it changed" in str(error)


@pytest.mark.parametrize("head", ["data:image/png;base64", "DATA:image/png;base64", "data:;BASE64", "data:a;b;base64"])
def test_a_data_url_is_told_by_its_scheme_and_its_contents_alone(head: str) -> None:
    assert parse(f"{head},{base64.b64encode(file_of()).decode()}").images[0].size == (60, 50)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/a.png", "image 1 of the messages: a https URL: nothing is fetched"),
        ("HTTPS://" + "a" * 5000, "image 1 of the messages: a HTTPS URL: nothing is fetched"),
        ("data:image/png;base64,@@@", "a data URL that is not base64"),
        ("data:image/png;base64,iVBORw0KGgo", "a data URL that is not base64 (Incorrect padding)"),
        ("data:image/png;base64,\ud800", "a data URL that is not base64"),
        ("data:", "must begin with data:image"),
        ("data:image/png,abc", "must begin with data:image"),
        (None, "an image part without a URL"),
        (data_url(b"hello"), "not a complete image"),
        (data_url(file_of()[:60]), "not a complete image"),
        (data_url(file_of((7169, 7168))), "7169x7168 = 51387392 pixels: at most 51380224"),
    ],
)
def test_an_image_that_cannot_be_used_is_one_clear_error(url: Any, message: str) -> None:
    error = refusal(url)
    assert message in str(error) and error.code == "invalid_image"


def test_the_second_image_at_fault_is_named() -> None:
    assert "image 2 of the messages" in str(refusal(data_url(file_of()), data_url(b"")))


def test_an_image_too_large_for_the_context_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3jax.serve.images.prepare", None)
    error = refusal(data_url(file_of((1000, 1000))))
    assert error.code == "context_length_exceeded"


def test_a_text_model_refuses_images() -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url(file_of())}}]
    line = {
        "custom_id": "a",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": content}]},
    }
    with pytest.raises(RequestError, match="messages hold 1 images: only text is supported"):
        parse_request(parse_line(json.dumps(line).encode()), tokenizer=TOKENIZER, limits=LIMITS)


# --- Features ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(config: ModelConfig) -> Transformer:
    """The tiny model with a tower."""
    tower = VisionConfig(grid_rows=4, grid_columns=4, width=16, mlp_width=24, num_blocks=1, num_heads=2, head_dim=8)
    config = dataclasses.replace(config, vision=tower, media_id=PAD, max_context=1024)
    return random_model(config, 1)


@pytest.fixture(scope="module")
def vision(seeing: Transformer) -> Vision:
    return seeing.vision


def test_an_image_is_encoded_once_and_other_pixels_or_sizes_are_not_it(vision: Vision) -> None:
    reports: list[str] = []
    encoder = ImageEncoder(vision, report=reports.append)
    first, again = (encoder.encode(prepare(file_of(kind=kind))) for kind in ("PNG", "BMP"))
    assert first is again and first.values.shape == (6, 32)
    others = [encoder.encode(prepare(file_of(**other))) for other in ({"level": 91}, {"size": (50, 60)})]
    assert len({first.key, *(other.key for other in others)}) == 3 and first.key < 0
    assert np.abs(others[0].values - first.values).max() > 1e-6
    assert reports == ["compiling the vision tower for 64 patches"]


def test_the_least_recently_used_features_go(vision: Vision) -> None:
    encoder = ImageEncoder(vision, cache_bytes=2 * 6 * 32 * 4)
    files = [file_of(level=level) for level in (1, 2, 3)]
    first, second = (encoder.encode(prepare(data)) for data in files[:2])
    assert encoder.encode(prepare(files[0])) is first
    encoder.encode(prepare(files[2]))
    assert encoder.encode(prepare(files[0])) is first
    assert encoder.encode(prepare(files[1])) is not second


# --- From a batch file to answers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing_engine(seeing: Transformer) -> Engine:
    recipe = {name: value for name, value in RECIPE.items() if name != "max_top_logprobs"}  # `engine`'s decode program
    sizes = Sizes.of(seeing.config, prefill_rows=2, snapshot_bytes=2**28, **recipe)
    return Engine(seeing, sizes, max_top_logprobs=RECIPE["max_top_logprobs"])


def likeliest(model: Transformer, job: Job, answer: list[int]) -> list[int]:
    """The tokens that a full forward pass likes most in the places of a greedy answer."""
    (request,) = job.requests
    pixels = np.concatenate([image.patches for image in job.images])
    grids = np.asarray([image.grid for image in job.images])
    logits = model(np.asarray([[*request.prompt, *answer]]), pixels=pixels, grids=grids)
    return np.asarray(logits[0, len(request.prompt) - 1 : -1]).argmax(-1).tolist()


def answers(engine: Engine, model: Transformer, jobs: list[Job]) -> tuple[list[list[int]], Scheduler]:
    scheduler, encoder = Scheduler(engine), ImageEncoder(model.vision)
    tokens: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        (request,) = encoder.job(job, PAD).requests
        scheduler.submit(dataclasses.replace(request, key=str(number), stop_ids=frozenset()))
    while scheduler.num_waiting or scheduler.num_running:
        for event in scheduler.step():
            assert event.token is not None
            tokens.setdefault(event.request.key, []).append(event.token)
    return [tokens[str(number)] for number in range(len(jobs))], scheduler


def noise(seed: int, size: tuple[int, int] = (112, 84)) -> str:
    buffer = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)).save(buffer, "PNG")
    return data_url(buffer.getvalue())


def greedy(job: Job) -> Job:
    (request,) = job.requests
    return dataclasses.replace(
        job, requests=(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, temperature=0.0)),)
    )


def test_features_reach_the_model_whatever_chunk_they_fall_into(seeing: Transformer, seeing_engine: Engine) -> None:
    jobs = [greedy(parse(noise(1))), greedy(parse(noise(2))), greedy(parse(noise(1)))]
    found, scheduler = answers(seeing_engine, seeing, jobs)
    assert found == [likeliest(seeing, job, answer) for job, answer in zip(jobs, found, strict=True)]
    first, second, third = (job.requests[0].prompt for job in jobs)
    assert first == second == third and found[0] != found[1]  # equal token ids, other pixels
    before_image = first.index(PAD) // RECIPE["prefill_chunk"] * RECIPE["prefill_chunk"]
    assert scheduler.cached_tokens > before_image  # the third prompt's image is the first one's


def test_a_hostile_image_fails_alone(seeing: Transformer, seeing_engine: Engine, tmp_path: Path) -> None:
    urls = {"a": noise(1), "b": data_url(file_of()[:40]), "c": "https://example.org/x.png", "d": noise(2)}
    urls |= {"e": "none.png", "g": "a\0.png", "h": "../out.jsonl"}
    lines = []
    for custom_id, url in urls.items():
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        body = {"messages": messages, "max_tokens": 2, **BRIEF}
        lines.append(json.dumps({"custom_id": custom_id, "url": "/v1/chat/completions", "body": body}))
    lines.append(json.dumps({"custom_id": "f", "url": "/v1/completions", "body": {"prompt": [65, PAD, 66]}}))
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    jobs = Jobs(
        scheduler=Scheduler(seeing_engine),
        tokenizer=TOKENIZER,
        limits=LIMITS,
        model_name="tiny",
        reader=ImageReader(PAD, tmp_path),
        encoder=ImageEncoder(seeing.vision),
    )
    batch = Batch(jobs=jobs)
    with OutputFile(tmp_path / "out.jsonl") as output, make_progress(Console(quiet=True)) as progress:
        summary = batch.run(tmp_path / "in.jsonl", output, progress)
    assert (summary.completed, summary.failed) == (2, 6)
    records = {r["custom_id"]: r for r in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert [custom_id for custom_id in records if records[custom_id]["error"] is None] == ["a", "d"]
    assert "not a complete image" in records["b"]["error"]["message"]
    assert "stands for an image" in records["f"]["error"]["message"]
