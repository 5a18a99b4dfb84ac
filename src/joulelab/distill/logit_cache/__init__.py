"""A teacher's distributions at every trained token, stored once for all epochs and students.

codecs            what is stored of a distribution, by name, and the manifest of a cache
target_encoding   keys of documents, sampling from the teacher's distribution, and the bytes of the result
cache_store       shard files: written by several resumable writers, read by key
kd_loss           the student's loss against stored or live distributions, and its gradient
teacher_outputs   runs the teacher: once over all rows to fill a cache, or live in every step
"""
