"""What a trained model costs when it is used: latency, energy per inference, and generation."""
