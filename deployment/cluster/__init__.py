"""The ownership machines on a Ray cluster: thin actors around them, and what a replica needs to be an owner."""
