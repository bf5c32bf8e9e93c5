"""Images on the host: how many tokens one takes."""

from k3jax.vision.image import image_token_count

__all__ = ["image_token_count"]
