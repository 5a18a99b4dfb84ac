"""What a teacher said about every trained token, kept once for all epochs and students.

The story: rows are cut into pieces with a key by content (`keys`), a codec says what is kept of a distribution
(`codecs`, `picking`, `packing`), shards hold it on disk (`shards`, `writer`), a reader gives it back for a batch
(`reader`, `targets`), and the loss compares (`loss`). `teaching` runs the teacher, to fill a cache or live.
"""
