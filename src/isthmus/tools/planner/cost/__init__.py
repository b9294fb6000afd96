"""Cost model: the time of an optimizer step from architecture, layout and data sheets, without a GPU."""
