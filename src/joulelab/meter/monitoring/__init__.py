"""The monitor that stands beside a program: one durable record per device and tick, in the fields operators parse."""
