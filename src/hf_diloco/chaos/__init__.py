"""Faults on purpose: what a run does when its hardware fails, on a small run of one's own."""
