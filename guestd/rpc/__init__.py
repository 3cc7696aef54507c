"""Servicers: proto ↔ the rooms of guestd, nothing else."""
