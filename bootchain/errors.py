"""What can go wrong while building the boot artifacts."""


class BootchainError(Exception):
    """A step failed; the text says which and what to do."""
