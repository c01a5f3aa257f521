//! Snapshots: saving a paused VM to files, and restoring a VM from them.
//!
//! | file | what it is |
//! |---|---|
//! | `saver` | writing a snapshot, with its `folder` and `state_file` |
//! | `source` | reading and checking a snapshot |
//! | `restorer` | creating a VM from a snapshot, with `overrides` of its backends and a `memory_mode` |
//! | `error` | errors of saving and restoring |

pub(crate) mod error;
pub(crate) mod folder;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod image_steps;
pub(crate) mod memory_mode;
pub(crate) mod overrides;
pub(crate) mod restorer;
pub(crate) mod saver;
pub(crate) mod source;
pub(crate) mod state_file;
