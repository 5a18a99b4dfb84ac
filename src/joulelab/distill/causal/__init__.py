"""The language-model pipelines: sft, kd, synthetic, dpo, on-policy and self.

config            settings            recipe       the six pipelines
data              tokenized rows      students     budgets, and a student's training as an artifact
teacher           logits, answers     objective    what a training differentiates
preference_data   scores, pairs       quality      evaluation of teacher and student
synthetic_data    filtered answers    models       teacher and student as torch modules
"""
