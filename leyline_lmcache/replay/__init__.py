"""Recorded conversations, replayed against real servers in arms that are compared in one run."""
