"""Checkpoints in the released layout and in ours: the name table, loading, export, inspection; Orbax in `orbax_io`."""
