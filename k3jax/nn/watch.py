"""What layers show of themselves in a forward pass, to whoever asks for it by name.

A watch maps the name of something that layers show to a function of it. The function runs in the forward pass, once in
every layer that has such a thing, and what it returns leaves the model (`Output.watched`). Shown today: `"router"`, a
`RouterView` of every MoE layer, and `"max_logit"`, the largest attention score of each row and head of every MLA layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Watch = Mapping[str, Callable[[Any], Any]]
NOTHING: Watch = {}


def show(watch: Watch, name: str, view: Callable[[], Any]) -> dict[str, Any]:
    """`{name: what the watch makes of view()}`, or nothing where the watch does not ask for `name`."""
    return {name: watch[name](view())} if name in watch else {}
