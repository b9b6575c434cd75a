"""Tables and plots, from the results that are committed."""
