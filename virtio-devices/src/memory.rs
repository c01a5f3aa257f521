//! The guest's memory and its queues, shared by threads.
//!
//! A device accesses memory through a single view, [`DmaView`]: it handles translated addresses, and logs writes in the
//! map's [dirty bitmap](DirtyBitmap) while the dirty log is on.

mod dirty;
pub(crate) mod discard;
mod dma;
pub(crate) mod effort;
pub(crate) mod file_mapping;
mod follow;
mod known;
mod map;
mod reach;
#[cfg(test)]
mod tests;
mod write_log;
pub(crate) mod zeros;

use std::sync::Arc;

use parking_lot::Mutex;
use virtio_queue::Queue;

pub use dirty::{DirtyBitmap, DirtySlice, PAGE_SIZE};
pub use dma::{DmaPass, DmaSpace, DmaView, Translate};
pub use follow::{DmaFollower, DmaMapping, DmaReach, NotFollowed};
pub use map::{GuestMap, GuestRegion, Memory};
pub use reach::Reach;
pub use write_log::{LogBusy, WriteLog};

/// A queue owned by its running worker: the worker locks it when it starts, and unlocks it when it ends, so that the
/// queue's position outlives the worker and a successor waits for its predecessor.
pub type SharedQueue = Arc<Mutex<Queue>>;
