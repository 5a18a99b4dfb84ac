"""Training tasks of the zoo: each module builds batches and an objective."""
