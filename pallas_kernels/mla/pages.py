"""The paged latent cache: layout, writing, reading. README.md describes the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

FP8 = jnp.float8_e4m3fn


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """N pages of `page` tokens; per token R latent and E extra values, shared by all heads.

    `extra` packs the tokens t and t + page/2 of a page side by side, so that a row of K3's fills 128 lanes. `scale` is
    the float32 factor of each token's latent where that is float8_e4m3fn, and None otherwise.
    """

    latent: Float[Array, "N page R"]
    extra: Float[Array, "N page/2 2*E"]
    scale: Float[Array, "N 1 page"] | None

    @classmethod
    def zeros(cls, num_pages: int, page: int, rank: int, extra: int, *, dtype: Any = jnp.bfloat16) -> Pages:
        """Empty pages; `dtype` float8_e4m3fn keeps the extra values in bfloat16. `page` is a number of tokens, even."""
        dtype = jnp.dtype(dtype)
        if page % 2:
            raise ValueError(f"a page has an even number of tokens, not {page}")
        fp8 = dtype == FP8
        return cls(
            latent=jnp.zeros((num_pages, page, rank), dtype),
            extra=jnp.zeros((num_pages, page // 2, 2 * extra), jnp.bfloat16 if fp8 else dtype),
            scale=jnp.zeros((num_pages, 1, page), jnp.float32) if fp8 else None,
        )

    @property
    def page(self) -> int:
        """Tokens a page."""
        return self.latent.shape[1]

    @property
    def rank(self) -> int:
        """Latent values a token."""
        return self.latent.shape[2]


def encode(pages: Pages, tokens: Float[Array, "*N C"]) -> tuple[Array, Array, Array | None]:
    """Tokens [latent | extra] as the cache holds them: latent, extra, scale (amax / 448) of each."""
    latent, extra = tokens[..., : pages.rank], tokens[..., pages.rank :].astype(pages.extra.dtype)
    if pages.scale is None:
        return latent.astype(pages.latent.dtype), extra, None
    wide = latent.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), 1e-30) / float(jnp.finfo(FP8).max)
    return (wide / scale[..., None]).astype(FP8), extra, scale


def locate(
    pages: Pages, page_table: Int[Array, "S P"], positions: Int[Array, "S T"]
) -> tuple[Int[Array, "S T"], Int[Array, "S T"]]:
    """Page and offset of each position; the page is N (which scatters drop) for -1, holes and what lies outside."""
    number = positions // pages.page
    inside = (positions >= 0) & (number < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.where(inside, number, 0), axis=1)
    held = inside & (page >= 0) & (page < len(pages.latent))
    return jnp.where(held, page, len(pages.latent)), positions % pages.page


def write(
    pages: Pages, tokens: Float[Array, "S T C"], page_table: Int[Array, "S P"], positions: Int[Array, "S T"]
) -> Pages:
    """Write tokens [latent | extra] at positions of their sequences; -1, holes and pages outside are dropped."""
    page, offset = locate(pages, page_table, positions)
    latent, extra, scale = encode(pages, tokens)
    half, width = pages.page // 2, extra.shape[-1]
    lanes = (offset // half)[..., None] * width + jnp.arange(width)
    return Pages(
        latent=pages.latent.at[page, offset].set(latent, mode="drop"),
        extra=pages.extra.at[page[..., None], (offset % half)[..., None], lanes].set(extra, mode="drop"),
        scale=None if pages.scale is None else pages.scale.at[page, 0, offset].set(scale, mode="drop"),
    )


def read(
    pages: Pages, numbers: Int[Array, "S P"], dtype: Any
) -> tuple[Float[Array, "S P*page C"], Bool[Array, "S P*page"]]:
    """The tokens [latent | extra] of the given pages, one after another, and whether they exist; holes read 0."""
    held = (numbers >= 0) & (numbers < len(pages.latent))
    index = jnp.where(held, numbers, len(pages.latent))
    fill: Any = {"mode": "fill", "fill_value": 0}
    latent, packed = pages.latent.at[index].get(**fill).astype(dtype), pages.extra.at[index].get(**fill).astype(dtype)
    if pages.scale is not None:
        latent = latent * pages.scale.at[index].get(**fill).astype(dtype).swapaxes(-1, -2)
    extra = jnp.concatenate(jnp.split(packed, 2, axis=-1), axis=-2)
    tokens = jnp.concatenate([latent, extra], axis=-1)
    rows, count = numbers.shape
    return tokens.reshape(rows, count * pages.page, -1), jnp.repeat(held, pages.page, axis=1)
