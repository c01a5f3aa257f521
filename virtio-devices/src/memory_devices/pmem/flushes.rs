//! The driver's requests, which wait for the medium.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::counters::{PmemCounter, Tally};
use crate::device::queue_worker::{ChainContext, ChainResult, QueueHandler};
use crate::queue::iovecs::{IoVecs, divide};
use crate::queue::ring::Chain;

/// The type of a flush, `VIRTIO_PMEM_REQ_TYPE_FLUSH`.
const FLUSH: u32 = 0;
/// `VIRTIO_PMEM_RESP_TYPE_OK`.
const OK: u32 = 0;
/// `VIRTIO_PMEM_RESP_TYPE_EIO`.
const EIO: u32 = 1;
/// The length of a reply, in bytes.
const ANSWER: usize = 4;

/// Handles requests: flushes everything that the guest wrote to the medium of this file, if there is one.
pub(super) struct Flushes(pub(super) Option<Arc<OwnedFd>>);

impl QueueHandler for Flushes {
    type Tally = Tally;

    /// A flush takes as long as the medium does.
    const BATCH: usize = 1;

    /// Handles a request (`virtio 1.4 §5.19.6`).
    fn answer<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { memory, storage: [readable, writable], tally, .. } = context;
        let (mut readable, mut writable) = (IoVecs::new(readable), IoVecs::new(writable));
        let divided = divide(memory, chain, &mut readable, &mut writable);
        let mut request = [0; 4];
        if divided.is_err() || !readable.take_front(&mut request) || writable.bytes() < ANSWER {
            tally.count(PmemCounter::BadChains);
            return ChainResult::Used(0);
        }
        let (answer, counter) = match u32::from_le_bytes(request) {
            FLUSH if self.flush() => (OK, PmemCounter::Flushes),
            FLUSH => (EIO, PmemCounter::BackendErrors),
            _ => (EIO, PmemCounter::BadRequests),
        };
        tally.count(counter);
        // At most the reply's length.
        ChainResult::Used(writable.write_at(0, &answer.to_le_bytes()) as u32)
    }
}

impl Flushes {
    /// Flushes the guest's writes to the medium; returns true on success.
    fn flush(&self) -> bool {
        self.0.as_ref().is_none_or(|file| rustix::fs::fsync(file).is_ok())
    }
}
