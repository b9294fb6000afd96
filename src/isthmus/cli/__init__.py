"""One thin module a verb: parse, call, print."""
