//! The guest's side of the channel by which it governs its VFs.
