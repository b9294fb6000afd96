"""The model of a rank: where its weights come from, how it is built, exported and used from Python."""
