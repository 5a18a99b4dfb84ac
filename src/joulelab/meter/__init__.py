"""Joules: sensors, the recorder process, marks of the measured program, and pure integration of one over the other."""
