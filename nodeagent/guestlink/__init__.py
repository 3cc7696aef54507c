"""The way into a guest: lanes, the link over them, the first talk, the relay."""
