"""Images on the host: decoding, patches, the tokens one takes, and packing for the vision tower."""

from k3jax.vision.decode import ImageError, image_size_of, open_image
from k3jax.vision.image import image_token_count, preprocess
from k3jax.vision.pack import Packed, pack
from k3jax.vision.pool import Prepared, ahead, prepare

__all__ = [
    "ImageError",
    "Packed",
    "Prepared",
    "ahead",
    "image_size_of",
    "image_token_count",
    "open_image",
    "pack",
    "prepare",
    "preprocess",
]
