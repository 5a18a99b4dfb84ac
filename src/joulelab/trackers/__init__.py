"""Where else numbers go while a run runs."""
