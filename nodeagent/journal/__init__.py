"""The node's memory on disk: SQLite, one file. See `store`."""
