"""A teacher's answers as training data: what is kept of them, what is dropped and why, and joules per kept one."""
