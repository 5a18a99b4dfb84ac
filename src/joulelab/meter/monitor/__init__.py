"""`joulelab monitor`: one durable record per device and tick, in the fields that operators parse."""
