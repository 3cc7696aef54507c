"""The guest daemon: serves every guest verb inside one sandbox.

Runs as root under the guest's init. `rpc` holds thin servicers over the rooms
`process`, `files` and `identity`; `bridge` joins it to the host. Imports the
standard library, grpc, protobuf and `cocoon_rpc` only, and late: a guest may run
under software emulation, where every import is seen.
"""

__version__ = "0.1.0"
