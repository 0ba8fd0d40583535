"""A learner: what one training process does for the run."""
