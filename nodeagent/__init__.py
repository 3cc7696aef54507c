"""The node agent: keeps warm pools of microVMs and hands them out over gRPC.

Data flows one way: `api` → `claims` → `pool` → `engine`, with `guestlink` as the
way into a guest and `journal` as the memory. `app` wires them, once.
"""

__version__ = "0.1.0"
