"""Extensions of joulelab, one of each kind."""
