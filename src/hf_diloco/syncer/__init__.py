"""The syncer: holds the global parameters, merges fragments, publishes them, writes down what it did."""
