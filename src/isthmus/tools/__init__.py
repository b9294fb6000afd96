"""Programs around training and conversion; they import everything below, and only the command line imports them."""
