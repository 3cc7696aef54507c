"""The cluster: a Raft group for warm counts, ownership and members.

A node works alone without it. `nodeagent` is the only importer.
"""
