"""Debian's cloud kernel, downloaded as a package and never installed on the host."""
