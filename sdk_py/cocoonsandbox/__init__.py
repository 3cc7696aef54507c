"""Python SDK for cocoon microVM sandboxes.

::

    from cocoonsandbox import Client

    with Client("127.0.0.1:7777") as client, client.new("rt") as sandbox:
        print(sandbox.exec("uname", "-r"))
"""

from cocoonsandbox.client import Client
from cocoonsandbox.errors import APIError, ExitError, ProtocolError, SandboxError, SandboxTimeout, SilkdError
from cocoonsandbox.sandbox import Sandbox

__all__ = [
    "APIError",
    "Client",
    "ExitError",
    "ProtocolError",
    "Sandbox",
    "SandboxError",
    "SandboxTimeout",
    "SilkdError",
]
