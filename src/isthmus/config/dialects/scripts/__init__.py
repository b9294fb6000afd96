"""Shell scripts of other programs: bash runs them with stand-ins, and their training command is recorded."""
