"""The command `minimax-serve MODEL`: flags, what fits this machine, start-up, and the run."""
