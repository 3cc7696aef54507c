"""The exception of this package."""


class ImageError(Exception):
    """An image cannot be declared, built or stored; the message says which one and what to do next."""
