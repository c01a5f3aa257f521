//! Memory that a guest gains and returns.

mod balloon;
mod memory;
mod pmem;
mod virtio_mem;
