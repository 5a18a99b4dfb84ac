"""Five ways to teach a small language model, on equal terms: sft, kd, synthetic, dpo, self."""
