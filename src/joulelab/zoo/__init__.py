"""The models: teachers and students by the names users write for them."""
