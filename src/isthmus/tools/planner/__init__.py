"""Plans a run without its weights and GPUs: which layouts fit, how much memory they need and how fast they are."""
