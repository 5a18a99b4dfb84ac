"""The models of the zoo: one file each, with its sizes and where the rest of it is made."""
