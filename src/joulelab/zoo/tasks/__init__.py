"""What the models of the zoo are trained to do: one file a task, each making batches and an objective."""
