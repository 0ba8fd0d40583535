"""The command line, ``hf-diloco``: one file a command. Exit codes: 0 done, 1 the run failed, 2 wrong use."""
