//! Filling of the queue's buffers.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vm_memory::Permissions;

use super::counters::{RngCounter, Tally};
use crate::device::queue_worker::{ChainContext, ChainResult, QueueHandler};
use crate::queue::iovecs::IoVecs;
use crate::queue::ring::Chain;

/// The most bytes read into one buffer, which bounds its time. A driver accepts short reads (`virtio 1.4 §5.4.6.1`).
const MAX_READ: usize = 64 << 10;
/// Delay for a source without data at the moment: not every source can be polled.
const PAUSE: Duration = Duration::from_millis(10);
/// Delay after the source failed. It may keep failing, and the driver, whose buffer waits, need not ring again.
const RETRY: Duration = Duration::from_secs(1);

/// Fills buffers from a source.
pub(super) struct Filler(pub(super) Arc<Mutex<OwnedFd>>);

impl QueueHandler for Filler {
    type Tally = Tally;

    fn answer<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { memory, storage: [storage, _], tally, .. } = context;
        let mut iovecs = IoVecs::new(storage);
        let extent = iovecs.append(memory, chain, Permissions::Write);
        if !extent.is_ok_and(|extent| extent.bytes > 0) {
            tally.count(RngCounter::BadChains);
            return ChainResult::Used(0);
        }
        iovecs.truncate(MAX_READ);
        match iovecs.receive(self.0.lock().as_fd(), &mut []) {
            Ok(len @ 1..) => {
                tally.count(RngCounter::Requests);
                tally.add(RngCounter::Bytes, len as u64);
                // At most MAX_READ.
                ChainResult::Used(len as u32)
            }
            result => {
                // A buffer is never returned empty (`virtio 1.4 §5.4.6.2`): it waits.
                let waits = result.is_err_and(|error| matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)));
                tally.add(RngCounter::BackendErrors, (!waits).into());
                ChainResult::Later(if waits { PAUSE } else { RETRY })
            }
        }
    }
}
