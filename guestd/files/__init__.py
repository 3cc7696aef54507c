"""Files in the guest: exact bytes or a typed refusal, never a hang."""
