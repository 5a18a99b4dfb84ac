"""The one training loop of the product, its hooks, and what it saves."""
