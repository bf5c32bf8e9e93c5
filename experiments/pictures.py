"""Pictures of coloured shapes with captions: answers that only a model that sees can give.

    python -m experiments.pictures make runs/pictures/data
    python train.py --config configs/train/pictures.yaml
    python serve.py --config configs/serve/pictures.yaml --checkpoint runs/pictures \\
        --input runs/pictures/data/questions.jsonl --output runs/pictures/answers.jsonl
    python -m experiments.pictures score runs/pictures/data runs/pictures/answers.jsonl
    python -m experiments.pictures show runs/pictures/data runs/pictures/answers.jsonl runs/pictures/metrics.jsonl X.png

A picture has one to four shapes, each in a quarter of its own, jittered in place and size, on a light background. Its
caption says how many there are, and of each the colour, the shape and where it is. Held out are arrangements (which
shapes in which colours stand where): none of them is in the training data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (235, 200, 40),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = ("one", "two", "three", "four")
QUESTION = "What is here?"
SIDE = 56  # pixels of a picture's side
HELD_OUT = 0.02  # of all arrangements, by a hash


@dataclass(frozen=True)
class Thing:
    """A shape of a colour in a quarter of a picture."""

    colour: str
    shape: str
    place: str

    def __str__(self) -> str:
        return f"{self.place} {self.colour} {self.shape}"


Arrangement = tuple[Thing, ...]  # in the order of PLACES


def arrangement(rng: random.Random) -> Arrangement:
    """One to four things of any kind."""
    places = sorted(rng.sample(range(4), rng.randint(1, 4)))
    return tuple(Thing(rng.choice(list(COLOURS)), rng.choice(SHAPES), PLACES[place]) for place in places)


def is_held_out(things: Arrangement) -> bool:
    """Whether an arrangement is for tests only, by a hash of it."""
    digest = hashlib.sha256(repr(things).encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT * 2.0**64


def caption(things: Arrangement) -> str:
    """What a model has to say of them."""
    return f"{NUMBERS[len(things) - 1]}: " + ", ".join(map(str, things))


def draw(things: Arrangement, rng: random.Random) -> Image.Image:
    """A picture of them; sizes, places within a quarter and the background differ from picture to picture."""
    picture = Image.new("RGB", (SIDE, SIDE), tuple(rng.randint(215, 255) for _ in range(3)))
    canvas = ImageDraw.Draw(picture)
    for thing in things:
        index, quarter = PLACES.index(thing.place), SIDE / 2
        x = (index % 2 + 0.5 + rng.uniform(-0.1, 0.1)) * quarter
        y = (index // 2 + 0.5 + rng.uniform(-0.1, 0.1)) * quarter
        _draw_shape(canvas, thing.shape, COLOURS[thing.colour], x, y, rng.uniform(0.25, 0.36) * quarter)
    return picture


def _draw_shape(canvas: ImageDraw.ImageDraw, shape: str, colour: tuple[int, ...], x: float, y: float, r: float) -> None:
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        canvas.ellipse(box, fill=colour)
    elif shape == "square":
        canvas.rectangle(box, fill=colour)
    elif shape == "triangle":
        canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    else:
        canvas.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=colour)
        canvas.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=colour)


def examples(*, held_out: bool, count: int, seed: int) -> Iterator[tuple[Arrangement, Image.Image]]:
    """Arrangements of one side, each with a picture of it."""
    rng = random.Random(seed)
    while count:
        things = arrangement(rng)
        if is_held_out(things) == held_out:
            count -= 1
            yield things, draw(things, rng)


def make(folder: Path, *, num_train: int, num_test: int) -> None:
    """Write pictures, chats to train on, and a batch of requests about held-out pictures with their answers."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    with (folder / "train.jsonl").open("w") as train:
        for number, (things, picture) in enumerate(examples(held_out=False, count=num_train, seed=1)):
            messages = [_question(picture, folder, f"train{number}"), {"role": "assistant", "content": caption(things)}]
            train.write(json.dumps({"messages": messages, "thinking": False}) + "\n")
    answers = {}
    with (folder / "questions.jsonl").open("w") as batch:
        for number, (things, picture) in enumerate(examples(held_out=True, count=num_test, seed=2)):
            name = f"test{number}"
            answers[name] = caption(things)
            batch.write(json.dumps(_request(name, _question(picture, folder, name))) + "\n")
    (folder / "answers.json").write_text(json.dumps(answers, indent=1))


def _question(picture: Image.Image, folder: Path, name: str) -> dict:
    """The user's message, with the picture that it shows saved."""
    path = f"pictures/{name}.png"
    picture.save(folder / path)
    image = {"type": "image_url", "image_url": {"url": path}}
    return {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}


def _request(custom_id: str, message: dict) -> dict:
    body = {"messages": [message], "chat_template_kwargs": {"thinking": False}, "temperature": 0, "max_tokens": 160}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def score(folder: Path, output: Path) -> dict[str, tuple[int, int]]:
    """{what: (right, of how many)} in a batch's results.

    Counted are whole captions, the number of shapes, the set of places, and of each shape the colour and the kind.
    """
    right, asked = Counter[str](), Counter[str]()
    for answer, truth in _answers(folder, output).values():
        (number, found), (true_number, things) = _read(answer), _read(truth)
        marks = [("caption", answer == truth), ("count", number == true_number)]
        marks += [("places", found.keys() == things.keys())]
        for place, (colour, shape) in things.items():
            said = found.get(place, ("", ""))
            marks += [("colour", said[0] == colour), ("shape", said[1] == shape)]
        for what, is_right in marks:
            asked[what] += 1
            right[what] += is_right
    return {what: (right[what], asked[what]) for what in asked}


def _answers(folder: Path, output: Path) -> dict[str, tuple[str, str]]:
    """{request: (what was answered, what is right)}."""
    expected, found = json.loads((folder / "answers.json").read_text()), {}
    for record in map(json.loads, output.read_text().splitlines()):
        answer = "" if record["error"] else record["response"]["body"]["choices"][0]["message"]["content"] or ""
        found[record["custom_id"]] = answer.strip(), expected[record["custom_id"]]
    return found


def _read(text: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """(number, {place: (colour, shape)}) of a caption, as far as it is one."""
    number, _, rest = text.partition(": ")
    words = [part.split(" ") for part in rest.split(", ")]
    return number, {" ".join(part[:2]): (part[2], part[3]) for part in words if len(part) == 4}


def show(folder: Path, output: Path, metrics: Path, picture: Path) -> None:
    """Draw a run's loss, and held-out pictures with their answers: green where right; else red, with what is right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 11), layout="constrained")
    loss, *cells = figure.subplots(3, 5).flat
    logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    loss.plot([row["step"] for row in logged], [row["loss"] for row in logged])
    loss.set(title="loss, nats a token", xlabel="step", yscale="log")
    answers = sorted(_answers(folder, output).items(), key=lambda item: int(item[0].removeprefix("test")))
    for axes, (name, (answer, truth)) in zip(cells, answers, strict=False):
        axes.imshow(Image.open(folder / f"pictures/{name}.png"))
        axes.set_axis_off()
        axes.set_title(answer.replace(", ", ",\n"), fontsize=8, color="green" if answer == truth else "firebrick")
        if answer != truth:
            axes.text(0, SIDE, truth.replace(", ", ",\n"), fontsize=8, color="gray", verticalalignment="top")
    figure.savefig(picture, dpi=100)


# A guess that knows the question and not the picture: the likeliest value of each kind.
CHANCE = {"caption": 0.0, "count": 1 / 4, "places": 1 / 4, "colour": 1 / len(COLOURS), "shape": 1 / len(SHAPES)}


def main() -> None:
    """The three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--train", type=int, default=20_000)
    making.add_argument("--test", type=int, default=200)
    scoring = commands.add_parser("score")
    scoring.add_argument("folder", type=Path)
    scoring.add_argument("output", type=Path)
    showing = commands.add_parser("show")
    for name in ("folder", "output", "metrics", "picture"):
        showing.add_argument(name, type=Path)
    args = parser.parse_args()
    if args.command == "make":
        make(args.folder, num_train=args.train, num_test=args.test)
        return
    if args.command == "show":
        show(args.folder, args.output, args.metrics, args.picture)
        return
    for what, (right, asked) in score(args.folder, args.output).items():
        print(f"{what:8}{right}/{asked} = {right / asked:.1%}   by chance {CHANCE[what]:.0%}")


if __name__ == "__main__":
    main()
