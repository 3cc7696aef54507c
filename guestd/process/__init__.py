"""Programs in the guest: who runs them, how they start, how they end."""
