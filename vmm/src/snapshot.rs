//! A guest in files: written of a paused VM, and read to make a VM of it.
//!
//! | file | what it is |
//! |---|---|
//! | `saver` | a snapshot that is written, with its `folder` and `state_file` |
//! | `source` | a snapshot that is read and checked |
//! | `restorer` | a VM that is made of it, with `overrides` of its backends, by a `memory_mode` |
//! | `error` | why a VM is not saved, or not restored |

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
