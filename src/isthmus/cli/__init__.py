"""One thin module per command: parse arguments, call the library, print the result."""
