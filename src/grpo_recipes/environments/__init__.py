"""Environments of other people's libraries behind one protocol. No torch."""
