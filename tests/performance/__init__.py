"""Measurements. They print; budgets are in docs/performance.md."""
