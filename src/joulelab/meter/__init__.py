"""Energy measurement: sensors, the recorder process, marks of the measured program, and energy computed from both."""
