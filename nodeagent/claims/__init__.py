"""Claims: who holds which sandbox, until when."""
