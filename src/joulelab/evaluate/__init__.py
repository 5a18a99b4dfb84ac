"""Quality metrics of trained models, per item."""
