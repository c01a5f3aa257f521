//! The guest's memory and its queues, as threads share them.

use std::sync::Arc;

use parking_lot::Mutex;
use virtio_queue::Queue;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

/// The guest's memory; the map can be exchanged while devices use it.
pub type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// A queue that its worker owns as long as it runs: the worker locks it once, when it starts, and unlocks it when it
/// ends, so that the queue's position outlives the worker and a successor waits for its predecessor.
pub type SharedQueue = Arc<Mutex<Queue>>;
