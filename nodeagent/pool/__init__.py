"""Warm pools: goldens and the machines cloned from them ahead of claims."""
