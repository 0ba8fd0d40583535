"""The outside world: how messages and fragments get from a learner to the syncer and back."""
